"""`tox -e sanitize` can fail: its sanitizer reports a kernel that writes behind the end of a tensor."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import accelcore_cpu
import pytest

RIGHT = "write(source.value, source.value_type, at, size, block.value)"
WRONG = RIGHT.replace("size", "size + 1")
LIBRARIES = ("libasan.so", "libstdc++.so.6")
TOX = Path(__file__).parents[3] / "tox.ini"


@pytest.mark.full
def test_a_kernel_that_writes_behind_a_tensor_is_reported(tmp_path):
    runtime = [subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in LIBRARIES]
    if not all(map(os.path.isabs, runtime)):
        pytest.skip("g++ has no address sanitizer here")
    shutil.copytree(Path(accelcore_cpu.__file__).parent, tmp_path / "accelcore_cpu")
    kernels = tmp_path / "accelcore_cpu" / "kernels" / "kernels.cpp"
    source = kernels.read_text()
    assert source.count(RIGHT) == 1
    kernels.write_text(source.replace(RIGHT, WRONG))
    tox = ConfigParser(interpolation=None)
    tox.read(TOX)
    settings = dict(line.split(" = ", 1) for line in tox["testenv:sanitize"]["set_env"].splitlines() if " = " in line)
    environment = {
        **os.environ,
        **settings,
        "ACCEL_KERNEL_CACHE": str(tmp_path / "cache"),
        "LD_PRELOAD": " ".join(runtime),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }
    tests = [str(Path(__file__).with_name("test_native_changes.py")), "-k", "leaves_all and sgd and flat"]
    options = ["-q", "--capture=sys", "-p", "no:cacheprovider"]
    assert " ".join(options[:2]) in tox["testenv:sanitize"]["commands"], "or the report is lost with pytest's capture"
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    report = done.stderr + done.stdout
    assert "heap-buffer-overflow" in report, report[-2000:]
    assert "WRITE of size 8" in report

"""What becomes of people who have installed accelcore-npu and have no NPU, no CANN, or neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from accelcore_npu.detection import cuda_build

torch_npu = find_spec("torch_npu") is not None
emulator = find_spec("accelcore_npu_emulator")

SCRIPT = """
import logging
import torch
import accelcore

logging.basicConfig(level=logging.WARNING, format="%(message)s")
accel = accelcore.select()
layer = torch.nn.Linear(2, 1)
trainer = accel.trainer(layer, accel.optimizers.create("sgd", layer.parameters(), lr=0.1),
                        loss=lambda model, batch: model(batch).square().mean())
trainer(torch.ones(2, 2))
print(accel.name, [probe.name for probe in accel.passed_over])
try:
    accelcore.select("npu")
except accelcore.AccelError as error:
    print(error)
"""


@pytest.fixture
def run():
    """Run a command as somebody without an NPU would."""

    def start(*command, **environment):
        bare = {name: value for name, value in os.environ.items() if not name.startswith(("ACCEL_", "ASCEND_"))}
        bare.pop("LD_LIBRARY_PATH", None)
        bare |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **environment}
        bare = {name: value for name, value in bare.items() if value is not None}
        return subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=240, env=bare, check=False
        )

    return start


pytestmark = pytest.mark.skipif(any(Path("/dev").glob("davinci[0-9]")), reason="this machine has an NPU")


def test_scripts_run_on_the_cpu_and_say_why_unless_npus_are_emulated_here_and_npu_is_refused_with_what_to_do(
    run, fork, tmp_path
):
    """Where torch_npu keeps a script from saying `import torch`, `accelcore run` starts it; elsewhere it is a fork."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    if torch_npu:
        result = run("-m", "accelcore", "run", str(script), TORCH_DEVICE_BACKEND_AUTOLOAD=None)
    else:
        result = fork(script).finish()
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("cpu [")
    assert "'npu'" in lines[0]
    assert ("npu does not work: there is no Ascend NPU" in result.stderr) == (emulator is None)
    assert "npu' cannot be used here" in result.stdout
    assert "why: there is no Ascend NPU (no /dev/davinci*)" in result.stdout
    assert "npu-smi" in result.stdout
    if torch_npu:
        assert "CANN is not set up" in result.stdout
        assert "set_env.sh" in result.stdout


@pytest.mark.skipif(
    torch_npu and cuda_build(), reason="torch-npu requires another build of torch, which doctor reports"
)
def test_doctor_explains(run):
    result = run("-m", "accelcore", "doctor", "--json")
    found = json.loads(result.stdout)
    backends = {backend["name"]: backend for backend in found["backends"]}
    assert backends["npu"]["state"] == "unusable"
    assert "no Ascend NPU" in backends["npu"]["reason"]
    assert backends["npu"]["remedy"]
    assert backends["cpu"]["state"] == "usable"
    assert result.returncode == 0


@pytest.mark.full  # tests/cli/test_doctor.py has a runtime that does the same
@pytest.mark.skipif(not torch_npu, reason="torch_npu is not installed")
def test_where_torch_npu_takes_import_torch_down_doctor_says_how_to_go_on(run):
    result = run("-m", "accelcore", "doctor", TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    text = " ".join(result.stdout.split())
    assert "torch_npu:_autoload" in text
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in text

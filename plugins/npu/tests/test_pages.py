"""Every script of the documentation runs on the emulated NPU, unchanged, with ACCEL_DEVICE=npu.

They run in this process, one after the other. A block that stands for another program, or needs more than a page shows,
runs on the CPU only: tests/docs, which runs all. README's and the first one of each page run here every time; the
others are marked `full`.
"""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from pathlib import Path

import pytest

from accelcore.torch_features import GET_KERNEL

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE = {
    "why.md": "its scripts are files of one program, which tests/docs puts together",
    "lint.md": "its scripts are what the linter finds, or does not find",
    "port.md": "test_port.py runs ported scripts here",
    "apex.md": "test_apex.py runs scripts for apex here",
    "reference_apex.md": "test_apex.py runs scripts for apex here, and resets amp",
    "transfer_to_npu.md": "test_examples.py runs both of its scripts here",
}


def blocks():
    for page in PAGES:
        for number, code in enumerate(
            re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
        ):
            why = ELSEWHERE.get(page.name) or ("it names a device" if 'select("' in code else "")
            if page.parent.name == "moving" and number == 0:
                why = "it is the script as it was, for other libraries"
            if 'same="everywhere"' in code and not GET_KERNEL.present:
                why = f"refused: torch has no {GET_KERNEL}"
            marks = [pytest.mark.skip(reason=why)] if why else []
            if number and page.name != "README.md":
                marks.append(pytest.mark.full)
            yield pytest.param(code, id=f"{page.name}-{number + 1}", marks=marks)


@pytest.fixture(scope="module")
def stand_ins():
    """Stand-ins for packages that recipes show and the tests do not install."""
    found = dict(sys.modules)
    sys.path.append(str(ROOT / "tests"))
    importlib.import_module("stand_ins")
    yield
    for name in sys.modules.keys() - found.keys():
        if not name.startswith("torch"):
            del sys.modules[name]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("code", list(blocks()))
def test_a_python_block_runs_on_the_npu_as_printed(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_DEVICE", "npu")
    monkeypatch.setattr(sys, "argv", ["block.py"])
    script = tmp_path / "block.py"
    script.write_text(code, encoding="utf-8")
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    for promised in re.findall(r"^ *print\(.*\)  # (.+)$", code, re.M):
        assert promised in printed.replace("on npu:0", "on cpu")

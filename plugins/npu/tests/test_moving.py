"""The page on moving from transfer_to_npu: the script as it was and as it is, on the emulated NPU and on the CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "moving" / "transfer_to_npu.md"
LOSSES = "\nimport json\nprint(json.dumps([float(loss) for loss in losses]))"


def test_what_a_script_became_gives_the_losses_it_gave_also_on_the_cpu(fork, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before, after = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    found = []
    for number, (code, device) in enumerate([(before, "npu"), (after, "npu"), (after, "cpu")]):
        script = tmp_path / str(number) / "script.py"
        script.parent.mkdir()
        script.write_text(f"import os\nos.chdir({str(script.parent)!r})\n{code}{LOSSES}")
        done = fork(script, ACCEL_DEVICE=device).finish()
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0][-1] < found[0][0]
    assert found[1] == pytest.approx(found[0], rel=5e-6, abs=1e-7)
    assert found[2] == pytest.approx(found[0], rel=5e-6, abs=1e-7)

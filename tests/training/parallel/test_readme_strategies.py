"""README's first script, whose optimizer is made before the trainer, under every strategy: it learns, and goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from accelcore.checkpoint.store import find

README = Path(__file__).parents[3] / "README.md"


# One that holds the whole model and one that divides it; how the others train is in the tests beside this one.
OTHER_WORDS = [pytest.param(word, marks=pytest.mark.full) for word in ("combine_ddp", "zero1", "zero2", "zero3")]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", *OTHER_WORDS])
def test_two_ranks_learn_and_are_finished_when_run_again(fork_ranks, tmp_path, monkeypatch, parallel):
    script = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]
    assert 'parallel="ddp"' in script
    (tmp_path / "train.py").write_text(script.replace('parallel="ddp"', f'parallel="{parallel}"'), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    first = [rank.finish() for rank in fork_ranks(tmp_path / "train.py", ACCEL_DEVICE="cpu")]
    assert [rank.returncode for rank in first] == [0, 0], "\n".join(rank.stderr for rank in first)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", first[0].stdout)]
    assert len(losses) == 10
    assert losses[-1] < 0.6 * losses[0]
    pieces = [name for name in find(tmp_path / "outputs" / "readme").manifest["files"] if name.startswith("model-")]
    assert pieces == ([] if "ddp" in parallel or parallel == "zero1" else ["model-00000", "model-00001"])
    again = [rank.finish() for rank in fork_ranks(tmp_path / "train.py", ACCEL_DEVICE="cpu")]
    assert [rank.returncode for rank in again] == [0, 0], "\n".join(rank.stderr for rank in again)
    assert "epoch" not in again[0].stdout

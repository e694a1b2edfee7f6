"""The gallery's scripts train as their twins in plain torch do, and say nothing of devices."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import runs
import twins

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"
NOT_IN_A_SCRIPT = [
    r"(?<![a-z])(cpu|cuda|npu|gpu|nccl|hccl|gloo|mps|xpu)(?![a-z])",
    r"\.to\(|\.device\b|device=",
    r"capabilities|is_available",
    r"torch\.(amp|autocast|cuda|distributed|accelerator)|\bdist\.|all_reduce|all_gather|GradScaler|DistributedSampler",
]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a script, or its twin, in this process."""
    monkeypatch.setenv("ACCEL_DEVICE", "cpu")
    return lambda which, name, *options: runs.run(which, name, tmp_path, *options)


def assert_alike(found, exact, *, rel=2e-6):
    assert len(found) == len(exact)
    for mine, theirs in zip(found, exact, strict=True):
        assert mine == pytest.approx(theirs, rel=rel)


@pytest.mark.parametrize("name", twins.NAMES)
def test_the_script_has_no_line_for_a_device(name):
    script = (GALLERY / f"{name}.py").read_text(encoding="utf-8")
    for pattern in NOT_IN_A_SCRIPT:
        assert not re.search(pattern, script, re.IGNORECASE), pattern


@pytest.mark.parametrize("name", twins.NAMES)
def test_alone_it_gives_the_losses_of_plain_torch(name, run, caplog):
    assert_alike(run("ours", name), run("twins", name))
    assert "trainer.batches" not in caplog.text, "an example reads its data as the documentation says"


def test_two_ranks_give_the_losses_of_plain_torch_with_ddp(fork_ranks, tmp_path):
    ended = [rank.finish() for rank in fork_ranks(runs.__file__, tmp_path, "ours", "twins", ACCEL_DEVICE="cpu")]
    assert [rank.returncode for rank in ended] == [0, 0], "\n".join(rank.stderr for rank in ended)
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first["ours"] == second["ours"]
    for name in twins.NAMES:
        assert_alike(first["ours"][name], first["twins"][name])


def test_the_gpt_under_bf16_autocast_gives_the_losses_of_plain_torch(run):
    assert_alike(run("ours", "nanogpt", "--precision=bf16"), run("twins", "nanogpt", "--precision=bf16"), rel=1e-4)


INTERRUPTED = [  # in this call of that function
    ("nanogpt", "get_batch", 26, 5),
    ("imagenet", "validate", 2, 1),
    ("dcgan", "is_fake", 7, 4),
]


@pytest.mark.parametrize(("name", "function", "calls", "left"), INTERRUPTED)
def test_a_run_that_was_interrupted_goes_on_to_the_same_losses(name, function, calls, left, run, monkeypatch, tmp_path):
    whole = run("ours", name)
    script, count = sys.modules[name], iter(range(1, calls))
    ready = getattr(script, function)

    def interrupted(*args):
        if next(count, None) is None:
            raise KeyboardInterrupt
        return ready(*args)

    monkeypatch.setattr(script, function, interrupted)
    out = f"--output={tmp_path / 'interrupted'}"
    with pytest.raises(KeyboardInterrupt):
        run("ours", name, out)
    monkeypatch.setattr(script, function, ready)
    assert run("ours", name, out, "--resume") == whole[left:]
    if name == "imagenet":
        assert run("ours", name, out, "--evaluate") == [max(epoch[1:] for epoch in whole)]

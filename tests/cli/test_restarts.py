"""Ranks die of SIGKILL at any moment; the world starts again, and ends with the losses of an undisturbed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "restarted_run.py"


def losses(folder, ranks):
    """Of each rank the steps and losses that it wrote, in order."""
    return [list(map(json.loads, (folder / f"losses-{rank}").read_text().splitlines())) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("ranks", "kills", "parallel"),
    [
        # By default tests/faults and test_run.py restart a job, each in forks or with less training.
        pytest.param(2, 1, "ddp", marks=pytest.mark.full),
        pytest.param(2, 30, "ddp", marks=[pytest.mark.full, pytest.mark.timeout(2400)]),
        # DDP lays its buckets anew after its first step: more than two addends then come in another order.
        pytest.param(4, 10, "combine_ddp", marks=[pytest.mark.full, pytest.mark.timeout(2400)]),
    ],
)
def test_a_job_whose_ranks_are_killed_ends_with_the_losses_of_an_undisturbed_one(
    machine, fork_ranks, ranks, kills, parallel
):
    left_alone, killed = machine.folder / "left alone", machine.folder / "killed"
    left_alone.mkdir()
    killed.mkdir()
    undisturbed = fork_ranks(SCRIPT, left_alone, 0, kills, parallel, size=ranks, TORCHELASTIC_RESTART_COUNT="0")
    assert [rank.finish().returncode for rank in undisturbed] == [0] * ranks

    options = ["--device", "cpu", "--nproc", str(ranks), "--max-restarts", str(kills)]
    arguments = [str(killed), str(kills), str(kills), parallel]
    done = machine.run("run", *options, str(SCRIPT), *arguments, timeout=60 + 60 * kills)
    assert done.returncode == 0, done.stderr
    assert [(killed / f"starts-{rank}").read_text() for rank in range(ranks)] == [str(kills)] * ranks

    for before, after in zip(losses(left_alone, ranks), losses(killed, ranks), strict=True):
        expected = dict(before)
        assert list(expected) == list(range(1, 8 * (kills + 1) + 1))
        assert set(expected) == {step for step, _ in after}
        for step, loss in after:  # some of them several times
            assert loss == expected[step], step

"""Jobs that are killed at random moments; `python -m tests.faults.kills` kills them twenty times, see kills.json."""

from __future__ import annotations

import pytest

from tests.faults import kills


@pytest.mark.parametrize("run", ["together", *(pytest.param(run, marks=pytest.mark.full) for run in ("zero1", "fsdp"))])
def test_a_killed_job_has_the_losses_of_an_undisturbed_one(tmp_path, run):
    counts = kills.survive(run, tmp_path, kills=1, seed=1, batches=24)
    assert counts["kills"] == 1

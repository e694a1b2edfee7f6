"""The programs that measure several ranks, at toy size: what they time does what it says."""

from __future__ import annotations

import forks
import pytest

from benchmarks import saving, sharded


@pytest.mark.full
def test_models_that_ranks_divide_are_timed_beside_fully_shard_by_hand():
    (table,) = sharded.run(2, ("small GPT",))
    held = {row.case: row.counts["megabytes"] for row in table.rows}
    whole = held[sharded.DDP]
    for name in (sharded.HAND, sharded.OURS, sharded.ZERO2):
        assert 0.45 * whole < held[name] < 0.55 * whole
    assert 0.6 * whole < held[sharded.ZERO1] < 0.75 * whole, "the model is whole, and its moments are halved"
    assert [goal.limit for goal in table.goals] == [1.02]
    assert all(row.timing is not None and "MB a rank" in row.note for row in table.rows)


@pytest.mark.full
def test_a_save_in_pieces_is_timed_beside_one_rank_that_gathers(monkeypatch):
    monkeypatch.setattr("benchmarks.on_ranks.get_context", lambda method: forks.servers)
    (table,) = saving.run(1, ranks=2, width=64, rounds=2)
    assert table.title.startswith("1 MB of 2 ranks")
    assert [row.case for row in table.rows] == [saving.GATHERED, saving.PIECES, saving.TORCH]
    assert all(row.timing is not None and row.timing.seconds.smallest > 0 for row in table.rows)

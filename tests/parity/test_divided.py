"""A model that the ranks divide: its shards are compared, and its weights are not loaded, which is noted."""

from __future__ import annotations

import json
from pathlib import Path

RANKS = Path(__file__).with_name("divided_ranks.py")


def test_weights_that_change_on_one_rank_are_named(fork_ranks, tmp_path):
    ended = [rank.finish() for rank in fork_ranks(RANKS, tmp_path, size=2)]
    assert [rank.returncode for rank in ended] == [0, 0], "\n".join(rank.stderr for rank in ended)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["none"][0], found["none"]
        assert "divided among ranks" in found["none"][5][0]
        phase, step, _, module = found["weights"][1:5]  # each rank gathers the others' shards before it computes
        assert (phase, step, module) == ("weights", 3, "2"), found["weights"]

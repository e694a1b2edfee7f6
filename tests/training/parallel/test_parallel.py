"""Two ranks in one job, beside what test_strategies.py says of every strategy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from accelcore.checkpoint import store

RANKS = Path(__file__).with_name("ranks.py")


# The first counts the replicas of the whole process.
PAIR = (
    "dropped", "wrapped", "shuffled", "bare_forward", "around_after_evaluation", "none_is_refused", "resumed",
)  # fmt: skip


@pytest.fixture(scope="module")
def pair(fork_ranks, tmp_path_factory):
    """What both ranks of one job found in each scenario."""
    folder = tmp_path_factory.mktemp("job")
    ended = [rank.finish() for rank in fork_ranks(RANKS, folder, *PAIR, size=2)]
    assert [rank.returncode for rank in ended] == [0, 0], "\n".join(rank.stderr for rank in ended)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return {scenario: [rank[scenario] for rank in ranks] for scenario in PAIR}


def flat(found):
    return torch.cat([torch.tensor(values) for values in found["weights"]])


def by_hand():
    """Weights of one process that takes, for each update, the rows of both ranks' micro-batches at once."""
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))
    targets = inputs.sum(1, keepdim=True)
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in torch.arange(16).split(4):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_model_that_is_wrapped_already_trains_as_its_module_and_reduces_once(pair):
    for rank in pair["wrapped"]:
        for found in rank["found"]:
            torch.testing.assert_close(flat(found), by_hand())
            assert found["reduced"] == []
        assert "bare module" in rank["refused"]


def test_shuffling_shares_every_row_out_once_an_epoch_in_a_new_order(pair):
    first, second = pair["shuffled"]
    for mine, other in zip(first["epochs"], second["epochs"], strict=True):
        assert len(set(mine) | set(other)) == 16
    assert first["epochs"][0] != first["epochs"][1]


def test_a_forward_pass_around_the_replicas_is_refused_and_ends_the_training_of_a_job(pair):
    for found in pair["bare_forward"]:
        assert "trainer.forward" in found["refused"]
        assert "cannot go on" in found["then"]


def test_an_evaluation_does_not_excuse_a_step_around_the_replicas(pair):
    for found in pair["around_after_evaluation"]:
        assert "trainer.forward" in found["refused"]


def test_ranks_that_would_train_apart_are_refused(pair):
    for found in pair["none_is_refused"]:
        assert 'parallel="ddp"' in found["refused"]


def test_two_ranks_resume_bit_same_in_the_middle_of_a_window(pair):
    found = pair["resumed"]
    for rank in found:
        assert rank["losses"] == rank["expected"]
    assert found[0]["path"] == found[1]["path"]
    parts = store.Checkpoint(Path(found[0]["path"])).manifest["files"]
    assert sorted(parts) == ["model", "rank-00000", "rank-00001", "shared"]


def test_a_trainer_that_is_dropped_leaves_no_hook_and_no_replica(pair):
    for found in pair["dropped"]:
        assert {"ddp", "combine_ddp"} & set(found)
        for parallel, (alive, gone) in found.items():
            assert alive["replicas"] == (parallel == "ddp"), "one trainer lives, of which the others were made before"
            assert gone == {"hooks": 0, "replicas": 0}

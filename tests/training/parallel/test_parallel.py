"""Several ranks train one model: what two ranks compute is what one would on the whole batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from accelcore.checkpoint import store

RANKS = Path(__file__).with_name("ranks.py")


# The first counts the replicas of the whole process.
PAIR = (
    "dropped", "plain", "accumulated", "short_window", "wrapped", "shuffled", "own_sampler", "bare_forward",
    "around_after_evaluation", "failed_save", "none_is_refused", "resumed",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(fork_ranks, tmp_path_factory):
    """Run scenarios as a launcher would; what each rank found."""

    def run(*scenarios, size):
        folder = tmp_path_factory.mktemp("job")
        ended = [rank.finish() for rank in fork_ranks(RANKS, folder, *scenarios, size=size)]
        assert [rank.returncode for rank in ended] == [0] * size, "\n".join(rank.stderr for rank in ended)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]

    return run


@pytest.fixture(scope="module")
def pair(run):
    """What both ranks of one job found in each scenario."""
    ranks = run(*PAIR, size=2)
    return {scenario: [rank[scenario] for rank in ranks] for scenario in PAIR}


def flat(found):
    return torch.cat([torch.tensor(values) for values in found["weights"]])


def by_hand(window, *, short=None, clip=None):
    """Weights of one process that takes, for each update, the rows of both ranks' micro-batches at once."""
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))
    targets = inputs.sum(1, keepdim=True)
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = [index for pair in range(0, 16, 4) for index in range(pair, pair + 4)]
    for start_ in range(0, 16, 4 * window):
        rows = order[start_ : start_ + 4 * window]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    ("scenario", "window", "clip", "steps"),
    [("plain", 1, None, 4), ("accumulated", 2, 0.5, 2), ("short_window", 3, None, 2)],
)
def test_two_ranks_compute_what_one_does_on_both_shares(pair, scenario, window, clip, steps):
    first, second = pair[scenario]
    assert first["weights"] == second["weights"]
    assert first["steps"] == second["steps"] == steps
    torch.testing.assert_close(flat(first), by_hand(window, clip=clip))
    assert not set(first["seen"]) & set(second["seen"])
    assert len(first["seen"] + second["seen"]) == 16


def test_a_model_that_is_wrapped_already_trains_as_its_module_and_reduces_once(pair):
    for rank in pair["wrapped"]:
        for found in rank["found"]:
            torch.testing.assert_close(flat(found), by_hand(1))
            assert found["reduced"] == []
        assert "bare module" in rank["refused"]


def test_shuffling_shares_every_row_out_once_an_epoch_in_a_new_order(pair):
    first, second = pair["shuffled"]
    for mine, other in zip(first["epochs"], second["epochs"], strict=True):
        assert len(set(mine) | set(other)) == 16
    assert first["epochs"][0] != first["epochs"][1]


def test_a_stream_is_shared_out_by_batches_and_all_ranks_get_as_many(run):
    first, second, third = (rank["iterable"] for rank in run("iterable", size=3))
    assert [first["mine"], second["mine"], third["mine"]] == [
        [[0, 1], [6, 7], [12, 13]],
        [[2, 3], [8, 9], [12, 13]],
        [[4, 5], [10, 11], [12, 13]],
    ]
    assert first["whole"] == third["whole"] == [[number, number + 1] for number in range(0, 14, 2)]


def test_a_sampler_of_the_users_own(pair):
    first, second = pair["own_sampler"]
    assert len(set(first["seen"]) | set(second["seen"])) == 16
    assert "shard=False" in first["refused"]


def test_a_forward_pass_around_the_replicas_is_refused_and_ends_the_training_of_a_job(pair):
    for found in pair["bare_forward"]:
        assert "trainer.forward" in found["refused"]
        assert "cannot go on" in found["then"]


def test_an_evaluation_does_not_excuse_a_step_around_the_replicas(pair):
    for found in pair["around_after_evaluation"]:
        assert "trainer.forward" in found["refused"]


def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_job_goes_on(pair):
    first, second = pair["failed_save"]
    assert "could be saved" in first["refused"]
    assert "another rank" in second["refused"]
    assert first["then"] == second["then"] == "step-00000000"


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

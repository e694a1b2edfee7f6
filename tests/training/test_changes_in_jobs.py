"""What changes after a trainer was made is followed by refresh on all ranks, or refused; never half."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.training.change_models import (
    ACCUMULATE,
    CHANGED_BEFORE,
    CHANGES,
    KINDS,
    MICRO_BATCHES,
    apply,
    batch,
    loss_of,
    start,
)
from tests.training.change_ranks import SHARDED, WHOLE, train

RANKS = Path(__file__).with_name("change_ranks.py")


@pytest.fixture(scope="module")
def found(fork_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    ended = [rank.finish() for rank in fork_ranks(RANKS, "all", folder)]
    assert [rank.returncode for rank in ended] == [0, 0], "\n".join(rank.stderr for rank in ended)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def by_hand(change, ranks):
    """As many ranks in one process: a model each, and gradients averaged."""
    pairs = [start(change) for _ in range(ranks)]
    models = [model for model, _ in pairs]
    optimizers = [torch.optim.AdamW(members, lr=0.05, eps=1e-3, fused=True) for _, members in pairs]

    for number in range(MICRO_BATCHES):
        if number == CHANGED_BEFORE:
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                apply(change, model, optimizer, rank)
            as_rank_0(models)
        for rank, model in enumerate(models):
            if number % ACCUMULATE == 0:
                model.zero_grad()
            (loss_of(model, batch(rank, number)) / (ACCUMULATE * ranks)).backward()
        if number % ACCUMULATE == 0:
            continue
        for same in zip(*gradient_lists(optimizers), strict=True):
            if same[0].grad is not None:
                total = sum(one.grad for one in same)
                for one in same:
                    one.grad = total.clone()
        for optimizer in optimizers:
            optimizer.step()
    return models[0]


def as_rank_0(models):
    for model in models:
        model.load_state_dict(models[0].state_dict())


def gradient_lists(optimizers):
    return [[one for group in optimizer.param_groups for one in group["params"]] for optimizer in optimizers]


def close(state, model):
    expected = {name: value.flatten() for name, value in model.state_dict().items()}
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(torch.tensor(state[name]), value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("parallel", [*WHOLE, *SHARDED])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_ranks_follow_a_change_alike_or_refuse_it(found, parallel, kind, change):
    first, second = (rank[f"{parallel}, {kind}, {change}"] for rank in found)
    if parallel in SHARDED and change == "add":
        for each in (first, second):
            assert len(each["said"]) == 6
            assert all("'added.weight' is" in said for said in each["said"])
            assert "'added.weight' is not divided among the ranks" in each["said"][1]
            assert each["unchanged"]
        return
    assert first == second, "the ranks have parted"
    close(first, by_hand(change, 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_one_process_follows_a_change(accel, kind, calls, change):
    model, trainer = train(accel, 0, None, kind, change, calls=calls)
    close({name: value.flatten().tolist() for name, value in model.state_dict().items()}, by_hand(change, 1))
    assert trainer.steps == MICRO_BATCHES // ACCUMULATE


def test_a_frozen_layer_that_is_added_is_the_same_on_all_ranks(found):
    first, second = (rank["frozen layer added"] for rank in found)
    for parallel in WHOLE:
        assert first[parallel] == second[parallel]


@pytest.mark.parametrize(
    ("parallel", "when"),
    [*((each, "before forward") for each in (*WHOLE, *SHARDED)), *((each, "after forward") for each in WHOLE)],
)
def test_a_change_within_a_window_drops_it_on_all_ranks_and_refresh_follows(found, parallel, when):
    first, second = (rank[f"{parallel}, {when}"] for rank in found)
    assert first == second, "the ranks have parted"
    assert "'middle.weight' was frozen" in first["said"]
    assert first["unchanged"]


@pytest.mark.parametrize("parallel", ["ddp", "combine_ddp", "fsdp"])
def test_a_change_on_one_rank_without_refresh_ends_the_job_and_names_it(fork_ranks, parallel):
    first, second = (rank.finish(60) for rank in fork_ranks(RANKS, "alone", parallel, "train"))
    assert first.returncode != 0 != second.returncode
    assert "'middle.weight' was frozen" in second.stderr
    assert "trainer.refresh()" in second.stderr
    assert "DistributedError: rank 1 of this job failed, and the others cannot go on without it" in first.stderr
    assert "'middle.weight' was frozen" in first.stderr


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_change_on_one_rank_is_refused_by_refresh_which_names_the_rank(fork_ranks, parallel):
    ranks = [rank.finish(60) for rank in fork_ranks(RANKS, "alone", parallel, "refresh")]
    for rank in ranks:
        assert rank.returncode != 0
        assert "rank 1 of this job would not train what" in rank.stderr or "rank 0 of this job" in rank.stderr
        assert "middle.weight" in rank.stderr


@pytest.mark.parametrize("parallel", [*WHOLE, *SHARDED])
def test_ranks_that_catch_the_error_of_refresh_can_train_no_more_and_do_not_hang(found, parallel):
    for rank in found:
        case = rank[f"{parallel}, caught"]
        assert [name for name, _, _ in case["said"]] == [
            "refresh",
            "call",
            "forward",
            "batches",
            "evaluate",
            "save",
            "refresh again",
        ]
        assert case["said"][0][1] == "DistributedError"
        for _, kind, said in case["said"][1:]:
            assert kind == "TrainingError"
            assert "trainer.refresh() failed" in said
            assert "middle.weight" in said
        assert case["unchanged"]

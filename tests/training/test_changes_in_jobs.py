"""What changes after a trainer was made is followed or refused on all ranks, within a window, too; never half."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.training.change_models import ACCUMULATE, CHANGES, KINDS, MICRO_BATCHES, WHEN, apply, batch, loss_of, start
from tests.training.change_ranks import SHARDED, WHOLE, train

RANKS = Path(__file__).with_name("change_ranks.py")
EVERY = [(change, when) for change in CHANGES for when in WHEN]


@pytest.fixture(scope="module")
def found(fork_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    ended = [rank.finish() for rank in fork_ranks(RANKS, "all", folder)]
    assert [rank.returncode for rank in ended] == [0, 0], "\n".join(rank.stderr for rank in ended)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def by_hand(change, when, ranks):
    """As many ranks in one process: a model each, gradients averaged, and the change made at the end of its window."""
    pairs = [start(change) for _ in range(ranks)]
    models = [model for model, _ in pairs]
    optimizers = [torch.optim.AdamW(members, lr=0.05, eps=1e-3, fused=True) for _, members in pairs]

    for number in range(MICRO_BATCHES):
        first, changes = number % ACCUMULATE == 0, number == WHEN[when]
        if changes and first:
            change_all(change, models, optimizers)
        if changes and not first:  # to the model at once, to what is trained when the window is over
            kept = [[group["params"][:] for group in optimizer.param_groups] for optimizer in optimizers]
            untrained = [[p for p in model.parameters() if not p.requires_grad] for model in models]
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                apply(change, model, optimizer, rank)
            later = [[group["params"][:] for group in optimizer.param_groups] for optimizer in optimizers]
        for rank, model in enumerate(models):
            if first:
                model.zero_grad()
            (loss_of(model, batch(rank, number)) / (ACCUMULATE * ranks)).backward()
        if first:
            continue
        if changes:
            for optimizer, members, ones in zip(optimizers, kept, untrained, strict=True):
                for group, those in zip(optimizer.param_groups, [*members, *[[]] * 2], strict=False):
                    group["params"] = those
                for one in ones:
                    one.grad = None
        for same in zip(*gradient_lists(optimizers), strict=True):
            if same[0].grad is not None:
                total = sum(one.grad for one in same)
                for one in same:
                    one.grad = total.clone()
        for optimizer in optimizers:
            optimizer.step()
        if changes:
            for optimizer, members in zip(optimizers, later, strict=True):
                for group, those in zip(optimizer.param_groups, members, strict=True):
                    group["params"] = those
            as_rank_0(models)
    return models[0]


def change_all(change, models, optimizers):
    for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        apply(change, model, optimizer, rank)
    as_rank_0(models)


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
@pytest.mark.parametrize(("change", "when"), EVERY)
def test_ranks_follow_a_change_alike_or_refuse_it(found, parallel, kind, change, when):
    first, second = (rank[f"{parallel}, {kind}, {change} {when}"] for rank in found)
    if parallel in SHARDED and change == "add":
        for each in (first, second):
            assert len(each["said"]) == 4
            assert all("'added.weight' is not divided among the ranks" in said for said in each["said"])
            assert each["unchanged"]
        return
    assert first == second, "the ranks have parted"
    close(first, by_hand(change, when, 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize(("change", "when"), EVERY)
def test_one_process_follows_a_change(accel, kind, calls, change, when):
    model, trainer = train(accel, 0, None, kind, change, when, calls=calls)
    close({name: value.flatten().tolist() for name, value in model.state_dict().items()}, by_hand(change, when, 1))
    assert trainer.steps == MICRO_BATCHES // ACCUMULATE
    if change == "swap":  # what is trained no more keeps the gradients of backward, and what is trained has none left
        assert all(parameter.grad is None for parameter in model.spare.parameters())


def test_a_frozen_layer_that_is_added_is_the_same_on_all_ranks(found):
    first, second = (rank["frozen layer added"] for rank in found)
    for parallel in WHOLE:
        assert first[parallel] == second[parallel]


def test_a_change_that_backward_cannot_follow_is_refused_under_ddp(found):
    for rank in found:
        assert rank["changed after forward"].startswith("what is trained was changed between a forward pass and")


@pytest.mark.parametrize(
    ("parallel", "when"),
    [("ddp", "between windows"), ("combine_ddp", "within a window"), ("fsdp", "between windows")],
)
def test_a_change_on_one_rank_ends_the_job_and_says_which_it_was(fork_ranks, parallel, when):
    first, second = (rank.finish(60) for rank in fork_ranks(RANKS, "alone", parallel, when))
    assert first.returncode != 0 != second.returncode
    said = "rank 1 of this job has changed what it trains, and rank 0 did not: 'middle.weight' was frozen"
    assert f"DistributedError: {said}" in second.stderr
    assert "DistributedError: rank 1 of this job failed, and the others cannot go on without it" in first.stderr
    assert said in first.stderr

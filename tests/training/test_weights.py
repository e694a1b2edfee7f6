"""Weighted windows: the gradients of unequal micro-batches are those of the batch they make together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelcore
from accelcore.precision.policy import Policy


def model():
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def rows(sizes):
    """Micro-batches of these many rows; each row pulls another way."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(size, 3, generator=generator) * (1 + 10 * n) for n, size in enumerate(sizes)]


def loss_of(m, batch):
    if not len(batch):  # the mean over nothing
        return m(torch.zeros(1, 3, dtype=m.weight.dtype)).sum() * 0
    return m(batch.to(m.weight.dtype)).float().square().mean()


def jointly(batches, steps_of, lr=0.01):
    """The weights after SGD on joint batches, in float64."""
    exact = model().double()
    optimizer = torch.optim.SGD(exact.parameters(), lr=lr)
    for first, last in steps_of:
        joint = torch.cat(batches[first:last]).double()
        optimizer.zero_grad()
        (exact(joint).square().mean() if len(joint) else exact.weight.sum() * 0 + exact.bias.sum() * 0).backward()
        optimizer.step()
    return exact


def make(accel, weigh=len, *, lr=0.01, **options):
    ours = model()
    optimizer = accel.optimizers.create("sgd", ours.parameters(), lr=lr)
    return accel.trainer(ours, optimizer, loss=loss_of, weight=weigh, **options)


def same(trainer, exact, tolerance=1e-4):
    for mine, its in zip(trainer.model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.double(), its, rtol=tolerance, atol=tolerance / 10)


def as_tensor(batch):
    return torch.tensor(len(batch))


def as_float_tensor(batch):
    return torch.tensor([float(len(batch))])


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=7),
    accumulate=st.integers(1, 4),
    weigh=st.sampled_from([len, as_tensor, as_float_tensor]),
    options=st.sampled_from([{}, {"flat": True}, {"loss_scale": 128.0}, {"loss_scale": "dynamic", "flat": False}]),
)
def test_a_window_of_unequal_micro_batches_equals_their_joint_batch(sizes, accumulate, weigh, options):
    """Short last windows, micro-batches of no weight, and windows that have nothing but those."""
    batches = rows(sizes)
    trainer = make(accelcore.select("cpu"), weigh, accumulate=accumulate, **options)
    for batch in trainer.batches(batches):
        trainer(batch)
    windows = [(start, min(start + accumulate, len(sizes))) for start in range(0, len(sizes), accumulate)]
    assert trainer.steps == len(windows)
    same(trainer, jointly(batches, windows))


def test_without_weights_micro_batches_count_alike_which_is_another_gradient(accel):
    """The reason for weights: 100 rows and 10 rows."""
    batches = rows([10, 1])
    plain, weighted = make(accel, None, accumulate=2), make(accel, accumulate=2)
    for batch in batches:
        plain(batch)
        weighted(batch)
    exact = jointly(batches, [(0, 2)])
    same(weighted, exact)
    assert (plain.model.weight.double() - exact.weight).abs().max() > 10 * (
        weighted.model.weight - exact.weight
    ).abs().max()
    assert not torch.allclose(plain.model.weight.double(), exact.weight, rtol=1e-2)


@pytest.mark.parametrize("options", [{"clip_norm": 0.5}, {"precision": Policy(model_dtype="bfloat16")}], ids=str)
def test_weights_come_before_clipping_and_work_with_masters(accel, options):
    batches = [batch.bfloat16().float() for batch in rows([5, 2, 4])]
    trainer = make(accel, accumulate=3, **options)
    exact = model().double()
    if "precision" in options:
        exact = model().bfloat16().double()
    joint = torch.cat(batches).double()
    exact(joint).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(exact.parameters(), options.get("clip_norm", 1e9))
    assert norm > 0.5
    torch.optim.SGD(exact.parameters(), lr=0.01).step()
    for batch in batches:
        trainer(batch)
    same(trainer, exact, tolerance=1e-5 if "clip_norm" in options else 0.02)


def test_large_weights_leave_small_gradients_what_they_are(accel):
    """Token counts go into millions: shares near 1 keep an fp16 gradient from leaving its range."""
    trainer = make(accel, lambda batch: len(batch) * 1_000_000, accumulate=2, precision="fp16", loss_scale=16.0)
    batches = rows([3, 5])
    for batch in batches:
        trainer(batch)
    same(trainer, jointly(batches, [(0, 2)]), tolerance=0.01)


@pytest.mark.parametrize(
    "weight", [-1, float("nan"), float("inf"), True, "7", None, torch.ones(2), [1]], ids=lambda weight: str(weight)[:9]
)
def test_what_is_no_weight_is_refused_and_the_next_window_is_right(accel, weight):
    bad = [False, True, False, False]
    batches = rows([1, 2, 3, 4])
    order = iter(bad)
    trainer = make(accel, lambda batch: weight if next(order) else len(batch), accumulate=2)
    trainer(batches[0])
    with pytest.raises(accelcore.TrainingError, match="weight"):
        trainer(batches[1])
    trainer(batches[2])
    trainer(batches[3])
    assert trainer.steps == 1
    same(trainer, jointly(batches, [(2, 4)]))


def test_some_with_and_some_without_a_weight_is_refused(accel):
    batches = rows([2, 3])
    for first, second, update in ((1, None, True), (None, 1, True), (1, None, False), (None, 1, False)):
        ours = model()
        trainer = accel.trainer(ours, accel.optimizers.create("sgd", ours.parameters()), accumulate=3)
        trainer.backward(loss_of(trainer.forward, batches[0]), weight=first)
        if update:
            trainer.update()
        with pytest.raises(accelcore.TrainingError, match="some micro-batches"):
            trainer.backward(loss_of(trainer.forward, batches[1]), weight=second)
        trainer.backward(loss_of(trainer.forward, batches[1]), weight=second)  # a window of its own
    trainer = make(accel)
    with pytest.raises(accelcore.TrainingError, match="no weight"):
        trainer.backward(loss_of(trainer.forward, batches[0]))
    with pytest.raises(accelcore.TrainingError, match="no weight"):
        make(accel, lambda batch: None)(batches[0])


@pytest.mark.parametrize("weigh", [len, as_tensor])
@pytest.mark.parametrize("saved_after", [1, 2, 4])
def test_a_weighted_window_is_resumed(accel, tmp_path, weigh, saved_after):
    batches = rows([4, 1, 2, 7, 3, 5])
    first, second = make(accel, weigh, accumulate=3), make(accel, weigh, accumulate=3)
    for batch in batches[:saved_after]:
        first(batch)
    first.save(tmp_path)
    second.resume(tmp_path)
    for batch in batches[saved_after:]:
        second(batch)
        first(batch)
    exact = jointly(batches, [(0, 3), (3, 6)])
    for trainer in (first, second):
        same(trainer, exact)
    assert torch.equal(first.model.weight, second.model.weight)


@pytest.mark.parametrize("calls", ["one", "three"])
def test_weights_by_hand_are_the_option(accel, calls):
    batches = rows([4, 1, 2])
    trainer = make(accel, len if calls == "one" else None, accumulate=3)
    for batch in batches:
        if calls == "one":
            trainer(batch)
        else:
            trainer.backward(loss_of(trainer.forward, batch), weight=len(batch))
            trainer.update()
    same(trainer, jointly(batches, [(0, 3)]))


@pytest.mark.parametrize("second", [2, torch.tensor(2.0)], ids=str)
def test_a_second_weighted_loss_of_one_micro_batch_is_refused(accel, second):
    batches = rows([2, 3])
    trainer = make(accel)
    trainer.backward(loss_of(trainer.forward, batches[0]), weight=2)
    with pytest.raises(accelcore.TrainingError, match="second loss of one micro-batch"):
        trainer.backward(loss_of(trainer.forward, batches[0]), weight=second)
    for batch in batches:  # windows of their own
        trainer.backward(loss_of(trainer.forward, batch), weight=len(batch))
        trainer.update()
    same(trainer, jointly(batches, [(0, 1), (1, 2)]))

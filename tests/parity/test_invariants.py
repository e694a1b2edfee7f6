"""What a comparison names without a tolerance, in runs of which one computes in bf16."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

import accelcore
from accelcore.parity.events import Event, Row, SeenStep, elements
from accelcore.parity.tolerance import odd_ranks


def nothing(step, net, optimizer):
    """Plant no fault."""


def train(change=nothing, *, dtype=None):
    """Train a model whose first bias has no gradient but rounding, which Adam makes as large as any other."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    nn.init.zeros_(net[0].bias)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(1, 6):
        change(step, net, optimizer)
        inputs, targets = torch.randn(8, 4), torch.randint(3, (8,))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype) if dtype else nullcontext():
            loss = cross_entropy(net(inputs), targets)
        loss.backward()
        optimizer.step()


def replayed(tmp_path, change=nothing):
    with accelcore.Record(tmp_path / "ref"):
        train()
    with accelcore.Replay(tmp_path / "ref") as replay:
        train(change, dtype=torch.bfloat16)
    assert [each.name for each in replay.result.settings] == ["autocast"]
    assert not replay.result.exact
    return replay.result


def weights(net, optimizer):
    with torch.no_grad():
        net[3].weight.add_(1e-3)


def state(net, optimizer):
    optimizer.state[net[3].weight]["exp_avg"].mul_(1.001)


def steps(net, optimizer):
    optimizer.state[net[3].weight]["step"].add_(1)


def statistics(net, optimizer):
    net[1].running_mean.mul_(1.001)


def random(net, optimizer):
    torch.rand(1)


def test_rounding_that_hides_differences_is_noted_and_is_none(tmp_path):
    result = replayed(tmp_path)
    assert result.agrees, result
    assert "rounding hides" in result.notes[0]


@pytest.mark.parametrize(
    ("fault", "phase", "module"),
    [
        (weights, "weights", "3"),
        (state, "update", "3"),
        (steps, "update", "3"),
        (statistics, "weights", "1"),
        (random, "random", None),
    ],
)
def test_what_a_step_begins_with_is_compared_however_rounding_has_grown(tmp_path, fault, phase, module):
    result = replayed(tmp_path, lambda step, *given: fault(*given) if step == 4 else None)
    assert (result.phase, result.step, result.module, result.is_cause) == (phase, 4, module, True), result


@pytest.mark.parametrize(
    ("fault", "module", "item"),
    [
        ("state", "model2.0", "old state momentum_buffer of weight"),
        ("lr", None, "learning rate of optimizer 1 group 0"),
    ],
)
def test_an_update_of_a_second_model_is_named_with_its_module(tmp_path, fault, module, item):
    def train_both(planted=None):
        torch.manual_seed(0)
        nets = [nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
        for step in range(1, 4):
            if planted and step == 2:
                if planted == "state":
                    optimizers[1].state[nets[1][0].weight]["momentum_buffer"].mul_(1.001)
                else:
                    optimizers[1].param_groups[0]["lr"] = 0.2
            for net in nets:
                net(torch.randn(2, 4)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    with accelcore.Record(tmp_path / "ref"):
        train_both()
    with accelcore.Replay(tmp_path / "ref") as replay:
        train_both(fault)
    found = replay.result
    assert (found.module, found.item, found.is_cause) == (module, item, True), found


@pytest.mark.parametrize("shape", [(), (7,), (128,), (64, 64), (100, 512), (3, 1 << 14), (2, 3, 128, 128)])
def test_a_sample_is_small_and_spread_over_all_rows_and_columns(shape):
    size = torch.Size(shape).numel()
    places = elements(torch.arange(size).view(shape))
    assert len(places) == size if size < 400 else 200 < len(places) < 400
    assert places.diff().unique().numel() <= 1
    assert size - 1 - places[-1] < max(1, size / 100)
    for length in shape:
        assert len((places % length).unique()) >= min(length, 60)


def test_a_sample_does_not_depend_on_strides():
    tensor = torch.randn(40, 60)
    assert torch.equal(elements(tensor.t().contiguous().t()), elements(tensor))
    assert torch.equal(
        elements(tensor.to(torch.complex64)[:, ::2]), elements(tensor.to(torch.complex64)[:, ::2].clone())
    )


def ranks(change):
    """Return a step of three ranks with gradients of their own and the mean of them."""
    own = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    held = own.mean(0).repeat(3, 1) * 0.25  # clipped
    change(own, held)
    return {
        rank: SeenStep(
            1,
            [Row(Event(kind, "layer", "weight"), "float32.cpu", (6,), "", 6) for kind in ("gradient", "reduced")],
            {"float32.cpu": torch.cat([own[rank], held[rank]])},
        )
        for rank in range(3)
    }


def test_a_rank_whose_gradient_is_not_reduced_is_odd():
    event = Event("reduced", "layer", "weight")
    assert odd_ranks(ranks(lambda own, held: None)) == {}
    assert odd_ranks(ranks(lambda own, held: held[1].copy_(own[1]))) == {event: 1}
    assert odd_ranks(ranks(lambda own, held: held[2, 3:].copy_(own[2, 3:]))) == {event: 2}
    assert list(odd_ranks(ranks(lambda own, held: held.copy_(own)))) == [event]


@pytest.mark.parametrize("around", ["training", "forward"])
def test_a_mode_within_a_step_whose_operators_are_recorded_is_refused(tmp_path, around):
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    counters = [FlopCounterMode(display=False) for _ in range(3)]

    def step(counter):
        with counter:
            loss = net(torch.ones(3, 4)).square().mean()
        loss.backward()
        optimizer.step()

    if around == "training":
        with counters[0], accelcore.Record(tmp_path / "ref", operators=[1]):
            step(nullcontext())
    else:
        with accelcore.Record(tmp_path / "ref", operators=[2]):
            step(counters[0])
            with pytest.raises(accelcore.ConfigurationError, match="around the whole step"):
                step(counters[1])
    flops = counters[0].get_total_flops()
    assert flops
    net(torch.ones(3, 4))
    assert counters[0].get_total_flops() == flops  # it has ended
    with counters[2]:
        net(torch.ones(3, 4))
    assert counters[2].get_total_flops() == 48

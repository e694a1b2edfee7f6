"""Where a difference begins: `is_cause` is True if all that an item was computed from was seen, else not known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accelcore
from accelcore.torch_features import GET_KERNEL


class Planted(nn.Module):
    """A module of which a fault changes the result, or the gradient only."""

    def __init__(self, fault=None):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.fault = fault

    def forward(self, x):
        y = x * self.scale
        if self.fault == "forward":
            y = y * 1.5
        if self.fault == "backward":
            y = y + 0.5 * (y - y.detach())
        return y


def model(fault=None, *, compiled=False, **_):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), Planted(fault), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if compiled:
        torch.compiler.reset()  # after eight modules, of earlier tests too, torch compiles no further one
        return torch.compile(net, backend="eager"), optimizer
    return net, optimizer


def train(net, optimizer, fault=None, *, outer=1.0, **_):
    for step in range(3):
        optimizer.zero_grad()
        (outer * net(torch.randn(8, 4))).square().mean().backward()
        if fault == "gradient" and step == 1:
            next(net.parameters()).grad *= 2
        if fault == "rate" and step == 1:
            optimizer.param_groups[0]["lr"] = 0.2
        optimizer.step()
        if fault == "weights" and step == 1:
            with torch.no_grad():
                net[2].bias += 1


def found(tmp_path, recorded, replayed):
    given = model(**recorded)
    with accelcore.Record(tmp_path / "ref", model=given[0], optimizer=given[1]):
        train(*given, **recorded)
    given = model(**replayed)
    with accelcore.Replay(tmp_path / "ref", model=given[0], optimizer=given[1]) as replay:
        train(*given, **replayed)
    return replay.result


@pytest.mark.parametrize(
    ("fault", "phase", "module"),
    [
        ("forward", "forward", "1"),
        ("backward", "backward", "1"),
        ("gradient", "collective", "0"),
        ("rate", "update", None),
        ("weights", "weights", "2"),
    ],
)
def test_a_difference_begins_where_all_before_it_was_seen_and_agreed(tmp_path, fault, phase, module):
    result = found(tmp_path, {}, {"fault": fault})
    assert (result.phase, result.module, result.is_cause) == (phase, module, True), result
    assert "begins here" in str(result)


def test_a_gradient_that_comes_from_a_loss_is_not_known_to_begin_anywhere(tmp_path):
    result = found(tmp_path, {}, {"outer": 1.5})
    assert (result.phase, result.is_cause) == ("backward", None), result
    assert "first seen" in str(result)


@pytest.mark.parametrize("fault", ["forward", "backward"])
@pytest.mark.parametrize("recorded", [True, False])
def test_behind_modules_that_a_compiler_hides_nothing_is_known(tmp_path, fault, recorded):
    result = found(tmp_path, {"compiled": recorded}, {"compiled": True, "fault": fault})
    assert (result.phase, result.is_cause) == ("backward", None), result


@pytest.mark.parametrize(("change", "module", "cause"), [({"fault": "forward"}, "1", True), ({"outer": 1.5}, "", None)])
def test_an_operator_begins_in_a_module_that_is_seen_and_not_in_the_loss(tmp_path, change, module, cause):
    given = model()
    with accelcore.Record(tmp_path / "ref", operators=[1]):
        train(*given)
    given = model(**change)
    with accelcore.Replay(tmp_path / "ref") as replay:
        train(*given, **change)
    assert replay.result.operator.startswith("aten::mul")
    assert (replay.result.module, replay.result.is_cause) == (module, cause)


class Joined(nn.Module):
    """A module that computes the same in two ways, one of which has an operator more."""

    def __init__(self, turned):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.turned = turned

    def forward(self, x):
        x = x * self.scale
        return torch.cat([2 * x, x]).roll(len(x), 0) if self.turned else torch.cat([x, 2 * x])


def test_operators_are_compared_only_in_modules_that_have_the_same_ones(tmp_path):
    def steps(turned):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), Joined(turned))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()

    with accelcore.Record(tmp_path / "ref", operators=[1]):
        steps(turned=False)
    with accelcore.Replay(tmp_path / "ref") as replay:
        steps(turned=True)
    assert replay.result.agrees, replay.result


@pytest.mark.skipif(not GET_KERNEL.present, reason=f"torch has no {GET_KERNEL}")
@pytest.mark.parametrize("factor", [2.0, float("nan")])
def test_an_operator_that_is_wrong_for_its_own_inputs_begins_anywhere(tmp_path, factor):
    """The mean of the loss, outside all modules, is replaced by a wrong kernel."""
    given = model()
    with accelcore.Record(tmp_path / "ref", operators=[1]):
        train(*given)
    given = model()
    library = torch.library.Library("aten", "IMPL")
    own = torch.library.get_kernel("aten::mean", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    library.impl(
        "mean",
        lambda x, **options: own.call_boxed(keys, x, **options) * (factor if x.dtype == torch.float32 else 1.0),
        "CPU",
    )
    try:
        with accelcore.Replay(tmp_path / "ref") as replay:
            train(*given)
    finally:
        library._destroy()
    assert (replay.result.operator, replay.result.module, replay.result.is_cause) == ("aten::mean", "", True)

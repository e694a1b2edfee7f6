"""Conformance of the optimizer registry: every route computes what the oracle computes, and remembers it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelcore import AccelError, Backend, ConfigurationError, UnsupportedError
from accelcore.testing.suite.optimizer_state import StateOfOptimizers, on_host, routes_of, state_error, with_rate
from accelcore.testing.suite.optimizer_steps import StepsOfOptimizers
from accelcore.testing.support.declared import MODEL_DTYPES, declared
from accelcore.testing.support.options import EVERY, LR, NINE, ORACLES, STEPS, oracle, parameters, step, taken_by
from accelcore.testing.support.oracles import Launches, eps, error, weights
from accelcore.testing.support.usable import DeviceTests

_UPDATES = (2000.0, 70_000.0)
_MANY = 2**21 + 3  # elements
_WITHOUT = (1, -1, 0, 2, -1)  # which parameter has no gradient in each step; -1: all have one


def _alike(device: torch.device, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return parameters of one shape."""
    return [nn.Parameter(torch.linspace(-1, number, 6).view(2, 3).to(device, dtype)) for number in (1, 2, 3)]


def _train_alike(optimizer: torch.optim.Optimizer, members: list[nn.Parameter]) -> None:
    """Make some steps, in which one or none of the parameters has no gradient."""
    for number, without in enumerate((-1, 0, 1, -1)):
        for index, parameter in enumerate(members):
            gradient = (index + 1) * (-1) ** (index * number) * torch.linspace(1, 2, 6).view(2, 3)
            parameter.grad = None if index == without else gradient.to(parameter)
        optimizer.step()


def _launches(accel: Backend, make: Callable[..., torch.optim.Optimizer], count: int) -> list[str]:
    """Return the operators that one step of `count` parameters launches, after the first steps."""
    members = [nn.Parameter(torch.ones(8, device=accel.device)) for _ in range(count)]
    optimizer, launches = make(members), Launches(accel.device)
    for number in range(3):
        for parameter in members:
            parameter.grad = torch.ones_like(parameter)
        with launches if number == 2 else nullcontext():
            optimizer.step()
    return launches.names


class TestOptimizers(StateOfOptimizers, StepsOfOptimizers, DeviceTests):
    """The registry, and every optimizer in it that there is an oracle for."""

    @pytest.mark.parametrize("name", EVERY)
    def test_numerics(self, accel: Backend, name: str) -> None:
        """Some steps and their state equal the oracle's in float64, by every route, with every option."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            for options in ORACLES[name][1]:
                reference, expected = on_host(name, options)
                for number in range(STEPS):
                    step(reference, expected, number)
                for route, optimizer, members in routes_of(accel, name, options):
                    for number in range(STEPS):
                        step(optimizer, members, number)
                    worst = max(map(error, members, expected))
                    assert worst < 2e-5, f"route {route} with {options} is off by {worst:.1e}"
                    worst = state_error(optimizer, reference)
                    assert worst < 1e-4, f"the state of route {route} with {options} is off by {worst:.1e}"
                    assert all(parameter.device == accel.device for parameter in members)

    @pytest.mark.parametrize("name", EVERY)
    def test_many_large_and_late(self, accel: Backend, name: str) -> None:
        """Many tensors and large ones are updated to the last element, early and after many thousand updates."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            generator = torch.Generator().manual_seed(9)
            shapes = [(1 + number % 7,) for number in range(130)] + [(70_001,), (521, 509)]
            start = [torch.randn(shape, generator=generator) for shape in shapes]
            found = [nn.Parameter(tensor.to(accel.device, copy=True)) for tensor in start]
            expected = [nn.Parameter(tensor.double()) for tensor in start]
            optimizer, reference = accel.optimizers.create(name, found, lr=LR), oracle(name, expected, lr=LR)
            for number in range(3):
                for parameter, twin in zip(found, expected, strict=True):
                    gradient = torch.randn(parameter.shape, generator=generator)
                    parameter.grad, twin.grad = gradient.to(accel.device), gradient.double()
                optimizer.step()
                reference.step()
                for one in (optimizer, reference) if number < len(_UPDATES) else ():
                    state = one.state_dict()
                    for entry in state["state"].values():
                        if isinstance(entry.get("step"), Tensor):
                            entry["step"] = torch.full_like(entry["step"], _UPDATES[number])
                    one.load_state_dict(state)
            differences = [(one.cpu() - twin).abs().max() for one, twin in zip(found, expected, strict=True)]
            off = [index for index, difference in enumerate(differences) if not difference < 1e-4]
            assert not off, f"{len(off)} of {len(found)} tensors are wrong, the first of shape {shapes[off[0]]}"

    @pytest.mark.parametrize("name", EVERY)
    def test_group_added_later(self, accel: Backend, name: str) -> None:
        """A parameter group that is added between steps is stepped from then on, with its own learning rate."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):

            def train(optimizer: torch.optim.Optimizer, members: list[nn.Parameter], late: nn.Parameter) -> None:
                members.append(late)
                for number in (1, 2):
                    late.grad = torch.ones_like(late) / number
                    step(optimizer, members, number)

            options = ORACLES[name][1][-1]
            expected = parameters(torch.device("cpu"), torch.float64)
            # From the start, with no gradient in the first step: Adagrad of torch before 2.13 takes no later group.
            last = nn.Parameter(torch.ones_like(expected[1]))
            groups = [{"params": list(expected)}, {"params": [last], "lr": LR / 2}]
            reference = oracle(name, groups, **with_rate(options))
            step(reference, expected, 0)
            train(reference, expected, last)
            for route, optimizer, members in routes_of(accel, name, options):
                step(optimizer, members, 0)
                late = nn.Parameter(torch.ones_like(members[1]))
                optimizer.add_param_group({"params": [late], "lr": LR / 2})
                train(optimizer, members, late)
                assert max(map(error, members, expected)) < 2e-5, f"route {route} does not step a group added later"

    @pytest.mark.parametrize("name", EVERY)
    def test_closure(self, accel: Backend, name: str) -> None:
        """`step(closure)` computes the loss with gradients, steps, and returns the loss."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):

            def train(optimizer: torch.optim.Optimizer, members: list[nn.Parameter]) -> Any:
                def closure() -> Tensor:
                    optimizer.zero_grad()
                    loss = torch.stack([(parameter - 2).square().sum() for parameter in members]).sum()
                    loss.backward()
                    return loss

                with torch.no_grad():  # as some loops do: step enables gradients for the closure
                    return [optimizer.step(closure) for _ in range(2)][-1]  # type: ignore[arg-type]

            reference, expected = on_host(name, {})
            loss = train(reference, expected)
            for route, optimizer, members in routes_of(accel, name, {}):
                found = train(optimizer, members)
                right = isinstance(found, Tensor) and error(found, loss) < 1e-4
                assert right, f"route {route} returns {found} for a closure's loss of {loss}"
                assert max(map(error, members, expected)) < 2e-5, f"route {route} steps otherwise with a closure"

    def test_nine(self, accel: Backend) -> None:
        """The nine optimizers of every device are registered, with their formulas."""
        for name in NINE:
            assert name in accel.optimizers.names(), f"{name} is missing, which every registry has from the start"
            routes = [choice.route for choice in accel.optimizers.explain(name, lr=LR)]
            assert "formula" in routes, f"{name} is here by {', '.join(routes)}, and not by its formula"

    @pytest.mark.parametrize("name", EVERY)
    def test_no_gradient_is_no_update(self, accel: Backend, name: str) -> None:
        """A parameter without gradient does not change; each counts its own updates, whenever it has a gradient."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            options = ORACLES[name][1][-1]
            reference, expected = on_host(name, options)
            for number, without in enumerate(_WITHOUT):
                step(reference, expected, number, without=without)
            exact = _alike(torch.device("cpu"), torch.float64)
            _train_alike(oracle(name, exact, **with_rate(options)), exact)
            for route, optimizer, members in routes_of(accel, name, options):
                for number, without in enumerate(_WITHOUT):
                    before = weights(members)
                    step(optimizer, members, number, without=without)
                    kept = without < 0 or torch.equal(weights(members)[without], before[without])
                    assert kept, f"route {route}: a parameter without gradient was changed"
                off = max(map(error, members, expected))
                assert off < 2e-5, f"route {route}: after a gradient that came late it is off by {off:.1e}"
                alike = _alike(accel.device, torch.float32)
                _train_alike(accel.optimizers.create(name, alike, route=route, **with_rate(options)), alike)
                off = max(map(error, alike, exact))
                assert off < 2e-5, f"route {route}: beside one without gradient, parameters of one shape mix up"

    @pytest.mark.parametrize("name", EVERY)
    def test_native(self, accel: Backend, name: str) -> None:
        """A native optimizer launches its own kernels, and their number does not grow with the parameters."""
        if name in accel.capabilities.native_optimizers:
            make = partial(accel.optimizers.create, name, lr=LR)
            few, many = (_launches(accel, make, count) for count in (4, 32))
            assert len(few) == len(many), f"it launches {len(few)} operators for 4 parameters, {len(many)} for 32"
            kind = ORACLES[name][0]
            switch = {"foreach": True} if "foreach" in taken_by(kind) else {}
            loop = _launches(accel, partial(kind, lr=LR, **switch), 4)
            assert few != loop, f"it launches what torch's foreach loop does: {', '.join(few)}"
            return
        with declared(False, f"a native {name}"):
            accel.optimizers.create(name, parameters(accel.device), lr=LR, route="fused")

    def test_every_native_is_there(self, accel: Backend) -> None:
        """Every optimizer that is declared native can be created, and updates its parameters."""
        for name in accel.capabilities.native_optimizers:
            members = parameters(accel.device)[:2]
            try:
                optimizer = accel.optimizers.create(name, members, lr=LR)
            except AccelError as error:
                raise AssertionError(f"native_optimizers declares {name}, which cannot be made") from error
            before = weights(members)
            step(optimizer, members, 0)
            assert not any(torch.equal(a, b) for a, b in zip(weights(members), before, strict=True)), name

    @pytest.mark.parametrize("dtype", MODEL_DTYPES)
    @pytest.mark.parametrize("name", ["sgd", "adamw"])
    def test_model_dtypes(self, accel: Backend, name: str, dtype: str) -> None:
        """All elements of parameters of every declared model dtype are updated."""
        if dtype not in accel.capabilities.model_dtypes:
            pytest.skip(f"not declared: models in {dtype}; the training part sees that the trainer refuses them")
        kind: torch.dtype = getattr(torch, dtype)
        parameter = nn.Parameter(torch.ones(_MANY, device=accel.device, dtype=kind))
        optimizer = accel.optimizers.create(name, [parameter], lr=0.25, weight_decay=0.0)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        off = error(parameter, torch.full((_MANY,), 0.75))
        assert off < max(4 * eps(kind), 1e-6), f"some elements are off by {off:.1e}"

    def test_explain(self, accel: Backend) -> None:
        """For every optimizer exactly one route is chosen, and the others have a reason."""
        assert {"sgd", "adamw"} <= set(accel.optimizers.names()), "every backend can at least run torch's loops"
        for name in accel.optimizers.names():
            options = {"lr": LR} if name in ORACLES else {}
            choices = accel.optimizers.explain(name, **options)
            assert sum(choice.chosen for choice in choices) == 1, name
            assert all(choice.reason for choice in choices if not choice.chosen), name

    def test_refusals(self, accel: Backend) -> None:
        """An optimizer, route or hyperparameter that does not exist is refused."""
        with pytest.raises(UnsupportedError):
            accel.optimizers.create("no such optimizer", parameters(accel.device))
        with pytest.raises(UnsupportedError):
            accel.optimizers.create("sgd", parameters(accel.device), lr=LR, route="no such route")
        with pytest.raises(ConfigurationError):
            accel.optimizers.create("sgd", parameters(accel.device), lr=LR, no_such_option=1)
        with pytest.raises(ConfigurationError):
            accel.optimizers.create("adamw", parameters(accel.device), lr=-1.0)

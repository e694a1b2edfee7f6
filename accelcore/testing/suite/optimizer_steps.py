"""Conformance of an optimizer's step: numbers of tensors, layouts, learning rates, overflows, and what it leaves."""

from __future__ import annotations

import copy
import math
import operator
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from accelcore import AccelError, Backend, UnsupportedError
from accelcore.testing.suite.optimizer_state import on_host, routes_of, with_rate
from accelcore.testing.suite.scaler_gradients import scaler_in_use
from accelcore.testing.support.declared import declared
from accelcore.testing.support.options import EVERY, LR, ORACLES, gradients, options_of, oracle, parameters, step
from accelcore.testing.support.oracles import error, spoil, weights

_COUNTS = (*range(1, 6), 7, 8, 9, 15, 16, 17, 31, 32, 33, 36, 263)  # of tensors: kernels take parts of a power of two
_MAY_BE_OFF = ("weight_decay", "momentum", "lr_decay")  # options that may be 0
_GROUPS = (9, 17, 36)  # of these, each in a group of its own

of_every = pytest.mark.parametrize("name", EVERY)


class StepsOfOptimizers:
    """The part of `TestOptimizers` that is about single steps."""

    @of_every
    def test_any_number_of_tensors(self, accel: Backend, name: str) -> None:
        """Every tensor is updated, however many there are, also beside one without elements, wherever it is.

        They are in one group, or each in one of its own, with its own learning rate.
        """
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            for count in _COUNTS:
                start = [torch.linspace(1, 2, 1 + number % 3) for number in range(count)]
                start.insert(count // 2 if count % 2 else count, torch.ones(0))
                found = [nn.Parameter(tensor.to(accel.device, copy=True)) for tensor in start]
                expected = [nn.Parameter(tensor.double()) for tensor in start]
                given: list[list[Any]] = [
                    [{"params": [each], "lr": LR / (1 + n % 5)} for n, each in enumerate(members)]
                    if count in _GROUPS
                    else list(members)
                    for members in (found, expected)
                ]
                pair = accel.optimizers.create(name, given[0], lr=LR), oracle(name, given[1], lr=LR)
                for number, optimizer in enumerate(pair):
                    for parameter in (found, expected)[number]:
                        parameter.grad = torch.ones_like(parameter) / 2
                    optimizer.step()
                off = [index for index in range(count + 1) if not error(found[index], expected[index]) < 2e-5]
                assert not off, f"of {count} tensors and an empty one, those at {off} are wrong"

    @of_every
    def test_layouts_of_gradients(self, accel: Backend, name: str) -> None:
        """A gradient of other strides than its parameter's, or of none, is read in the right order."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            start = torch.linspace(-1, 1, 24).reshape(4, 6)
            given = torch.linspace(2, -1, 24).reshape(6, 4).t()
            layouts: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
                "transposed": (lambda value: value, given),
                "contiguous, of a transposed parameter": (lambda value: value.t().contiguous().t(), given.contiguous()),
                "expanded": (lambda value: value, torch.linspace(1, 2, 6).expand(4, 6)),
                "with gaps": (lambda value: value, torch.stack([given, given + 9], -1)[..., 0]),
                "contiguous, of a channels last parameter": (_channels_last, _images(given)),
                "channels last, of a contiguous parameter": (_images, _channels_last(given)),
            }
            for layout, (lay_out, gradient) in layouts.items():
                reference = nn.Parameter(lay_out(start).double())
                plain = oracle(name, [reference], lr=LR)
                for _ in range(2):
                    reference.grad = gradient.double()
                    plain.step()
                for choice in accel.optimizers.explain(name, lr=LR):
                    found = nn.Parameter(lay_out(start.to(accel.device, copy=True)))
                    strides = found.stride()
                    try:
                        optimizer = accel.optimizers.create(name, [found], route=choice.route, lr=LR)
                    except UnsupportedError:
                        continue
                    for _ in range(2):
                        found.grad = _placed(gradient, accel.device)
                        optimizer.step()
                    off = error(found, reference)
                    assert off < 2e-5, f"route {choice.route}: with a gradient that is {layout} it is off by {off:.1e}"
                    assert found.stride() == strides, f"route {choice.route} changed the strides of a parameter"

    @of_every
    def test_profiled(self, accel: Backend, name: str) -> None:
        """A profiler shows what a step runs, by every route, and changes nothing of it."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            for choice in accel.optimizers.explain(name, lr=LR):
                pair = parameters(accel.device), parameters(accel.device)
                try:
                    made = [accel.optimizers.create(name, each, route=choice.route, lr=LR) for each in pair]
                except UnsupportedError:
                    continue
                for optimizer, members in zip(made, pair, strict=True):
                    step(optimizer, members, 0)
                made[0].step()
                with warnings.catch_warnings():  # a device may warn of what its profiles lack
                    warnings.simplefilter("ignore")
                    with profile(activities=[ProfilerActivity.CPU]) as recorded:
                        made[1].step()
                shown = [event.name for event in recorded.events() if not event.name.startswith("Optimizer.")]
                assert shown, f"route {choice.route}: a profile of a step shows no kernel"
                assert max(map(error, *pair)) == 0, f"route {choice.route}: a profiler changes the step"

    @of_every
    def test_options_of_groups(self, accel: Backend, name: str) -> None:
        """Each parameter group has its own options, by every route, also where they are 0 and others are not."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            together = ORACLES[name][1][-1]
            zeros = {key: type(value)() for key, value in together.items() if key in _MAY_BE_OFF or value is True}
            for usual, options in (*product([{}], [*options_of(name).values(), together]), (together, zeros)):

                def groups(members: list[nn.Parameter], options: dict[str, Any] = options) -> list[dict[str, Any]]:
                    return [{"params": members[:2]}, {"params": members[2:], **options}]

                expected = parameters(torch.device("cpu"), torch.float64)
                reference = oracle(name, groups(expected), **with_rate(usual))
                for number in range(3):
                    step(reference, expected, number)
                for choice in accel.optimizers.explain(name, **with_rate(usual)):
                    members = parameters(accel.device)
                    try:
                        optimizer = accel.optimizers.create(
                            name, groups(members), route=choice.route, **with_rate(usual)
                        )
                    except UnsupportedError:
                        continue
                    for number in range(3):
                        step(optimizer, members, number)
                    off = max(map(error, members, expected))
                    assert off < 2e-5, (
                        f"route {choice.route}: with {options} in the second group it is off by {off:.1e}"
                    )

    @of_every
    def test_learning_rates(self, accel: Backend, name: str) -> None:
        """A learning rate of 0, one that is a tensor, and one that is changed in place each count from the next step.

        An optimizer that takes no tensor refuses it.
        """
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):

            def train(optimizer: torch.optim.Optimizer, members: list[nn.Parameter], *, tensor: bool) -> None:
                for number, rate in enumerate((LR, LR / 4, 0.0, LR / 2)):
                    for group in optimizer.param_groups:
                        if tensor:
                            group["lr"].fill_(rate)
                        else:
                            group["lr"] = rate
                    step(optimizer, members, number)

            reference, expected = on_host(name, {})
            train(reference, expected, tensor=False)
            for route, optimizer, members in routes_of(accel, name, {}):
                train(optimizer, members, tensor=False)
                assert max(map(error, members, expected)) < 2e-5, f"route {route} steps by another learning rate"
            members = parameters(accel.device)
            try:
                optimizer = accel.optimizers.create(name, members, lr=torch.tensor(LR))
            except AccelError:
                return
            train(optimizer, members, tensor=True)
            assert max(map(error, members, expected)) < 2e-5, "a learning rate that changed in place is not seen"

    @of_every
    def test_changes_between_steps(self, accel: Backend, name: str) -> None:
        """A step uses the current hyperparameters and weights, which a schedule or a checkpoint may have set.

        The weights may lie in other memory then. An optimizer that cannot maximize later refuses it.
        """
        changes = {option: values[option] for option, values in options_of(name).items()}

        def train(optimizer: torch.optim.Optimizer, members: list[nn.Parameter], *, turns: bool) -> None:
            first, second = optimizer.param_groups
            left = []  # alive, so that no other tensor gets their memory
            for number in range(4):
                step(optimizer, members, number)
                if "maximize" in second:
                    second["maximize"] = turns and number == 1
                first["lr"] /= 4
                second["lr"] /= 2
                if "weight_decay" in first:
                    first["weight_decay"] += 0.5
                for option, value in changes.items() if number == 1 else ():
                    if isinstance(value, float | tuple) and second.get(option):
                        second[option] = value
                with torch.no_grad():
                    for parameter in members:
                        parameter.add_(1.0)
                        if number == 2:
                            left.append(parameter.data)
                            parameter.data = parameter.data.clone()

        def groups(members: list[nn.Parameter]) -> list[dict[str, Any]]:
            return [{"params": members[:2]}, {"params": members[2:], "lr": 0.1}]

        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            options = {"lr": LR, **ORACLES[name][1][-1]}
            for turns in (False, True):
                found, expected = parameters(accel.device), parameters(torch.device("cpu"), torch.float64)
                train(oracle(name, groups(expected), **options), expected, turns=turns)
                try:
                    train(accel.optimizers.create(name, groups(found), **options), found, turns=turns)
                except UnsupportedError:
                    if not turns:
                        raise
                    continue
                assert max(map(error, found, expected)) < 2e-5, "it steps by what was set when it was made"

    @of_every
    def test_zeros(self, accel: Backend, name: str) -> None:
        """Parameters, gradients and single elements that are 0, or gradients that are large, are updated as others."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            zeros, ones, mixed = torch.zeros(2, 3), torch.ones(2, 3), torch.tensor([[0.0, 2.0, 0.0], [-1.0, 0.0, 3.0]])
            pairs = [*product((zeros, ones, mixed), (zeros, ones, mixed)), (ones, 1e6 * mixed)]

            def train(optimizer: torch.optim.Optimizer, members: list[nn.Parameter]) -> None:
                for number in range(3):
                    for parameter, (_, gradient) in zip(members, pairs, strict=True):
                        given = gradient + 1.0 if number == 0 else gradient * number
                        parameter.grad = given.to(parameter.device, parameter.dtype, copy=True)
                    optimizer.step()

            for options in ({}, ORACLES[name][1][-1]):
                expected = [nn.Parameter(start.double()) for start, _ in pairs]
                train(oracle(name, expected, **{"lr": LR, **options}), expected)
                for choice in accel.optimizers.explain(name, **{"lr": LR, **options}):
                    found = [nn.Parameter(start.to(accel.device, copy=True)) for start, _ in pairs]
                    try:
                        optimizer = accel.optimizers.create(name, found, route=choice.route, **{"lr": LR, **options})
                    except UnsupportedError:
                        continue
                    train(optimizer, found)
                    for one, other, (start, gradient) in zip(found, expected, pairs, strict=True):
                        assert error(one, other) < 2e-5, (
                            f"route {choice.route} with {options}: {start.tolist()} with the gradient "
                            f"{gradient.tolist()} is wrong"
                        )

    @of_every
    def test_hooks_and_clearing(self, accel: Backend, name: str) -> None:
        """Hooks of a step are called once each; `zero_grad` clears gradients, or sets them to 0."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            members, calls = parameters(accel.device), list[str]()
            optimizer = accel.optimizers.create(name, members, lr=LR)
            optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
            optimizer.register_step_post_hook(lambda *_: calls.append("after"))
            step(optimizer, members, 0)
            assert calls == ["before", "after"], f"in one step the hooks called were {calls}"
            optimizer.zero_grad(set_to_none=False)
            left = [parameter.grad for parameter in members if parameter.grad is not None]
            assert not any(bool(gradient.any()) for gradient in left), "zero_grad(set_to_none=False) leaves gradients"
            step(optimizer, members, 1)
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in members), "zero_grad() leaves gradients"

    @of_every
    def test_overflow_is_skipped_by_every_optimizer(self, accel: Backend, name: str) -> None:
        """With every option, an overflow leaves parameters and state as they are, and the next step is as without it.

        Scaled gradients are divided by the scale before anything else.
        """
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            for options in ORACLES[name][1]:
                members = parameters(accel.device)
                optimizer = accel.optimizers.create(name, members, **with_rate(options))
                scaler = scaler_in_use(accel, 3001.0)  # no power of 2, by which nothing is rounded
                reference, expected = on_host(name, options)
                for number, value in enumerate((None, math.inf, None, math.nan, None)):
                    for parameter, gradient in zip(members, gradients(number), strict=True):
                        parameter.grad = (torch.empty_like(parameter).copy_(gradient)) * scaler.state_dict()["scale"]
                    if value is None:
                        step(reference, expected, number)
                    else:
                        spoil(members[1], value)
                    before = weights(members), _state_of(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                    if value is not None:
                        assert all(map(torch.equal, weights(members), before[0])), "an overflow changed a parameter"
                        assert _same(_state_of(optimizer), before[1]), "an overflow changed the state"
                off = max(map(error, members, expected))
                assert off < 2e-5, f"with scaled gradients and {options} it is off by {off:.1e}"

    @of_every
    def test_optimizers_that_take_turns(self, accel: Backend, name: str) -> None:
        """Two optimizers of one kind, as those of a GAN, keep to their own learning rates, states and parameters."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            found, expected = [parameters(accel.device) for _ in range(2)], list[list[nn.Parameter]]()
            pairs = []
            for rate, members in zip((LR, LR / 4), found, strict=True):
                reference, own = on_host(name, {"lr": rate})
                pairs.append(((accel.optimizers.create(name, members, lr=rate), members), (reference, own)))
                expected.append(own)
            for number in range(3):
                for shift, pair in enumerate(pairs):
                    for optimizer, members in pair:
                        step(optimizer, members, 2 * number + shift)
            for one, other in zip(found, expected, strict=True):
                assert max(map(error, one, other)) < 2e-5, "it steps by what another optimizer has"

    @of_every
    def test_step_leaves_the_rest(self, accel: Backend, name: str) -> None:
        """A step changes values in sight of autograd, and no gradient, stride, dtype or `requires_grad`.

        A closure is called once.
        """
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            for route, optimizer, members in routes_of(accel, name, ORACLES[name][1][-1]):
                form = [_form(parameter) for parameter in members]
                calls: list[int] = []

                def closure(calls: list[int] = calls, members: list[nn.Parameter] = members) -> Tensor:
                    calls.append(1)
                    loss = torch.stack([parameter.square().sum() for parameter in members]).sum()
                    torch.autograd.backward(loss)
                    return loss

                for number in range(2):
                    versions = [parameter._version for parameter in members]
                    step(optimizer, members, number)
                    trained = [p.grad is not None and p.numel() > 0 for p in members]
                    unseen = [p._version == before for p, before in zip(members, versions, strict=True)]
                    assert not any(map(operator.and_, trained, unseen)), (
                        f"route {route} changes parameters in a way that autograd cannot see"
                    )
                    given = gradients(number)
                    same = all(
                        error(p.grad, g) == 0.0 for p, g in zip(members, given, strict=True) if p.grad is not None
                    )
                    assert same, f"route {route} changes gradients"
                for enabled in (True, False):
                    optimizer.zero_grad()
                    calls.clear()
                    with torch.set_grad_enabled(enabled):
                        optimizer.step(closure)  # type: ignore[arg-type]
                        assert torch.is_grad_enabled() == enabled, f"route {route} leaves gradients {not enabled}"
                    assert calls == [1], f"route {route} calls a closure {len(calls)} times"
                assert [_form(parameter) for parameter in members] == form, f"route {route} changes more than values"


def _placed(gradient: Tensor, device: torch.device) -> Tensor:
    """Return a gradient on a device, in its strides."""
    size = sum((count - 1) * stride for count, stride in zip(gradient.shape, gradient.stride(), strict=True)) + 1
    memory = gradient.as_strided((size,), (1,), gradient.storage_offset()).to(device, copy=True)
    return memory.as_strided(gradient.shape, gradient.stride())


def _images(matrix: Tensor) -> Tensor:
    """Return the 24 elements of a matrix as images."""
    return matrix.reshape(2, 3, 2, 2)


def _channels_last(matrix: Tensor) -> Tensor:
    return _images(matrix).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def _form(parameter: nn.Parameter) -> tuple[Any, ...]:
    return parameter.shape, parameter.stride(), parameter.dtype, parameter.device, parameter.requires_grad


def _state_of(optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy(optimizer.state_dict()["state"])


def _same(found: Any, expected: Any) -> bool:
    """Return whether two states are equal; one that was made and is all zeros counts as absent."""
    return all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(expected.get(number, {}).get(key, 0 * value)))
        for number, entry in found.items()
        for key, value in entry.items()
        if value is not None
    )

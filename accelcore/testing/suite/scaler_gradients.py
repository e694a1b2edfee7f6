"""Conformance of a loss scaler's look at gradients: overflows anywhere, of any dtype, in any memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from accelcore import Backend
from accelcore.scaling.contract import LossScaler
from accelcore.testing.support.declared import refused
from accelcore.testing.support.kinds import VIEWS
from accelcore.testing.support.oracles import error, overflow, spoil, weights
from accelcore.util.text import first_line

Make = Callable[[Backend, list[nn.Parameter]], Optimizer]

_MANY = 2**21 + 3  # elements: more than a grid of blocks, or a table of chunks, may have


def make_plain(accel: Backend, parameters: list[nn.Parameter]) -> Optimizer:
    """Return torch's loop, which no kernel helps."""
    return torch.optim.SGD(parameters, lr=0.5, foreach=False)


def make_own(accel: Backend, parameters: list[nn.Parameter]) -> Optimizer:
    """Return the backend's SGD."""
    return accel.optimizers.create("sgd", parameters, lr=0.5, momentum=0.9)


def make_adaptive(accel: Backend, parameters: list[nn.Parameter]) -> Optimizer:
    """Return the backend's AdamW."""
    return accel.optimizers.create("adamw", parameters, lr=0.5, weight_decay=0.0)


every_optimizer = pytest.mark.parametrize("make", [make_plain, make_own, make_adaptive], ids=["plain", "sgd", "adamw"])


def parameters_of(accel: Backend, *sizes: int) -> list[nn.Parameter]:
    """Return a parameter of each size."""
    return [nn.Parameter(torch.linspace(1, 2, size).to(accel.device)) for size in sizes or (8, 5)]


def scaler_in_use(accel: Backend, init: float) -> LossScaler:
    """Return a scaler that has scaled a loss: before, it refuses gradients."""
    scaler = accel.scaler.create(init=init)
    scaler.scale(torch.ones((), device=accel.device))
    return scaler


def new_gradients(accel: Backend, scaler: object, parameters: list[nn.Parameter], factor: float = 1.0) -> None:
    """Compute new gradients of half the sum of squares: the parameters themselves, times `factor`."""
    for parameter in parameters:
        parameter.grad = None
    loss = torch.stack([parameter.square().sum() / 2 for parameter in parameters]).sum()
    scaled: Tensor = scaler.scale(loss * factor)  # type: ignore[attr-defined]
    scaled.backward()


def take_step(scaler: Any, optimizer: Optimizer) -> None:
    """Step, and move the scale."""
    scaler.step(optimizer)
    scaler.update()


class GradientsOfScaler:
    """The part of `TestScaler` that is about the gradients it looks at."""

    @pytest.mark.parametrize("group", [0, 1])
    @pytest.mark.parametrize("element", [0, _MANY // 2, _MANY - 1])
    def test_overflow_anywhere(self, accel: Backend, group: int, element: int) -> None:
        """One inf is found in any group of parameters and any element of a large gradient; all are unscaled."""
        parameters = parameters_of(accel, _MANY, _MANY)
        optimizer = torch.optim.SGD([{"params": [parameter]} for parameter in parameters], lr=0.5, foreach=False)
        scaler, before = accel.scaler.create(init=1024.0), weights(parameters)
        new_gradients(accel, scaler, parameters, 1e-3)
        spoil(parameters[group], math.inf, element)
        take_step(scaler, optimizer)
        assert scaler.skipped == 1, "an overflow was not found"
        assert all(map(torch.equal, weights(parameters), before))
        new_gradients(accel, scaler, parameters, 0.5)
        take_step(scaler, optimizer)
        off = max(error(after, start * 0.75) for after, start in zip(parameters, before, strict=True))
        assert off < 1e-6, "some elements of a large gradient are not unscaled"

    @every_optimizer
    @pytest.mark.parametrize("position", [0, 31, 64, 255, 299])
    def test_overflow_in_any_tensor(self, accel: Backend, make: Make, position: int) -> None:
        """One inf is found in any of hundreds of gradients, also beside an empty one and in several dtypes."""
        *parameters, last = parameters_of(accel, *[1 + number % 3 for number in range(300)], 0)
        known = [name for name in accel.capabilities.model_dtypes if name in ("float64", "bfloat16")]
        for name in ("float32", *known):
            for number, parameter in enumerate(parameters):
                if number % 2:
                    parameter.data = parameter.data.to(getattr(torch, name))
            scaler, before = scaler_in_use(accel, 8.0), weights(parameters)
            optimizer = make(accel, [*parameters, last])
            for spoilt in (True, False):
                for parameter in (*parameters, last):
                    parameter.grad = torch.ones_like(parameter)
                if spoilt:
                    spoil(parameters[position], math.inf, 0)
                take_step(scaler, optimizer)
                same = list(map(torch.equal, weights(parameters), before))
                right = all(same) if spoilt else not any(same)
                assert right, f"an overflow in gradient {position} of 300 was not found"
            assert scaler.skipped == 1

    @pytest.mark.parametrize("kind", [kind for kind in VIEWS if kind != "nothing"])
    def test_gradients_in_any_strides(self, accel: Backend, kind: str) -> None:
        """An inf in the first, a middle or the last element is found, and all are unscaled, in any kind of memory."""
        for element in (None, 0, 2, -1):
            gradient = VIEWS[kind](torch.full((4, 6), 2.0, device=accel.device))
            parameter = nn.Parameter(torch.ones_like(gradient))
            parameter.grad = gradient
            optimizer, scaler = make_plain(accel, [parameter]), scaler_in_use(accel, 4.0)
            if element is not None:
                place = tuple(element if count > 2 else -1 for count in gradient.shape)
                gradient[place] = overflow(accel.device)
            take_step(scaler, optimizer)
            right = 0.75 if element is None else 1.0
            assert bool((parameter == right).all()), f"a gradient that is {kind}, with an inf at {element}, is misread"

    def test_gradients_of_several_dtypes(self, accel: Backend) -> None:
        """Gradients of every declared dtype but fp16 are divided by the scale, also near the ends of its range."""
        kinds = [getattr(torch, name) for name in accel.capabilities.model_dtypes if name != "float16"]
        parameters = [nn.Parameter(torch.ones(3, dtype=kind, device=accel.device)) for kind in kinds]
        optimizer, scaler = make_plain(accel, parameters), scaler_in_use(accel, 1024.0)
        for parameter in parameters:
            parameter.grad = torch.tensor([256.0, 2.0**120, -(2.0**-100)]).to(parameter)
        scaler.unscale_(optimizer)
        for parameter in parameters:
            assert parameter.grad is not None
            found = parameter.grad.tolist()
            assert found == [0.25, 2.0**110, -(2.0**-110)], f"of gradients in {parameter.dtype} it makes {found}"
        scaler.update()
        for spoilt, value in product(parameters, (math.inf, -math.inf, math.nan)):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            spoil(spoilt, value, 1)
            take_step(scaler, optimizer)
            assert all(bool((each == 1).all()) for each in parameters), f"{value} in {spoilt.dtype} is no overflow"

    def test_sparse_gradients(self, accel: Backend) -> None:
        """Rows that come twice in a sparse gradient add up; it is unscaled, and an overflow in it skips the step."""
        weight = nn.Parameter(torch.ones(4, 2, device=accel.device))
        optimizer, scaler = make_plain(accel, [weight]), accel.scaler.create(init=64.0)
        try:
            for factor in (1.0, math.inf):
                optimizer.zero_grad()
                rows = functional.embedding(torch.tensor([1, 1, 2], device=accel.device), weight, sparse=True)
                torch.autograd.backward(scaler.scale(rows.sum() * factor))
                assert weight.grad is not None
                found = weight.grad.coalesce().to_dense()[:, 0]
                assert found.tolist() == [0.0, 128 * factor, 64 * factor, 0.0], "rows that come twice do not add up"
                take_step(scaler, optimizer)
                assert weight[:, 0].tolist() == [1.0, 0.0, 0.5, 1.0], f"a sparse gradient of {factor} is not unscaled"
        except (NotImplementedError, RuntimeError) as error_:
            refused(f"sparse gradients: {first_line(error_)}")
        assert scaler.skipped == 1

    def test_large_gradients_are_no_overflow(self, accel: Backend) -> None:
        """Finite gradients do not count as overflow, even if their sum or their squares do."""
        parameters = parameters_of(accel, 64, 64)
        optimizer, scaler = make_plain(accel, parameters), scaler_in_use(accel, 2.0)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 3e38)
        take_step(scaler, optimizer)
        assert scaler.skipped == 0, "gradients that are large and finite count as overflow"

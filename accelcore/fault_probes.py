"""What the faults of torch in general ask of the installed version; see `known_faults.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_WITH_EPSILON: tuple[Any, ...] = (
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
)

__all__ = ["backward_under_autocast", "fp16_epsilon", "skipped_first_step", "steps"]


def steps(make: Callable[[list[Tensor]], torch.optim.Optimizer], start: Tensor, gradients: list[Tensor]) -> Tensor:
    """What becomes of `start` when this optimizer takes a step with each gradient."""
    parameter = nn.Parameter(start.clone())
    optimizer = make([parameter])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def fp16_epsilon() -> bool:
    """Some steps of each class with gradients of 1e-5 in fp16: does not one of them leave the parameter finite?"""
    small = torch.full((8,), 1e-5, dtype=torch.float16)
    return not any(
        bool(steps(partial(kind, foreach=foreach), small, [small] * 6).isfinite().all())
        for kind in _WITH_EPSILON
        for foreach in (False, True)
    )


def skipped_first_step() -> bool:
    """Memory that was never written is made NaN: does momentum begin with it?"""
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True)
    with _unwritten_is_nan():
        for overflow in (1.0, 0.0):
            parameter.grad = torch.ones(4)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(overflow)  # type: ignore[attr-defined]
            optimizer.step()
    return bool(parameter.isnan().any())


def backward_under_autocast() -> bool:
    """The gradient of a part that forward computes in fp32: has it fewer bits where the model is compiled?"""
    torch.manual_seed(0)
    weight, rows = torch.randn(16, 16), torch.randn(8, 16)

    def exact(weight: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return (rows @ weight).square().sum()

    gradients: list[Tensor] = []
    for forward in (exact, torch.compile(exact, backend="aot_eager")):
        leaf = weight.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = forward(leaf)
        gradients += torch.autograd.grad(loss, [leaf])
    return not torch.allclose(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)


@contextmanager
def _unwritten_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])

"""bf16 and fp16 on this CPU: what it has units for, what it does without, and when that pays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch.nn.functional import linear

from accelcore.roles.precision import Work
from accelcore_cpu import upcast
from accelcore_cpu.bargain import Bargain

__all__ = ["has_units", "pays", "prepare", "say"]

logger = logging.getLogger("accelcore")

_UNITS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),  # the last is ARM's
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
_WIDTH = 384


@cache
def has_units(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies in this dtype by itself."""
    found: Mapping[str, Any] = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in _UNITS[dtype])


def prepare(dtype: torch.dtype) -> None:
    """Make ready to compute in a dtype; where the CPU has no units for it, say so once."""
    if not has_units(dtype):
        if dtype is torch.float16:
            upcast.install()
        say(dtype)


@cache
def say(dtype: torch.dtype) -> None:
    """Say what a dtype costs for which the CPU has no units."""
    if dtype is torch.float16:
        cost = "products are computed in fp32 and rounded, which is right, and no faster than fp32"
        remedy = '; "bf16" is what this CPU has' if has_units(torch.bfloat16) else ""
    else:
        cost, remedy = f"a product of {_WIDTH} x {_WIDTH} takes {_of_fp32(dtype):.1f} times as long as in fp32", ""
    logger.warning("this CPU has no units for %s: %s%s", str(dtype).removeprefix("torch."), cost, remedy)


def pays(dtype: torch.dtype, work: Work) -> bool:
    """Whether such a training can gain by autocast; True where `prepare` has said what there is to say."""
    return not has_units(dtype) or _bargain(dtype).of(work.casts, work.operations) >= 0


@cache
def _bargain(dtype: torch.dtype) -> Bargain:
    """What a cast costs, forward and backward, and what each operation of a forward product gains with its backward."""

    def layer(rows: int, width: int) -> Callable[[], Any]:
        inputs = [torch.ones(shape, requires_grad=True) for shape in ((rows, width), (width, width), (width,))]

        def run() -> None:
            torch.autograd.grad(linear(*inputs).float().sum(), inputs)

        return run

    def run(low: bool, layer: Callable[[], Any]) -> None:
        with torch.autocast("cpu", dtype, enabled=low):
            layer()

    found = Bargain.measure(run, (False, True), layer(8, 8), layer(_WIDTH, _WIDTH), operations=2 * _WIDTH**3)
    return Bargain(found.cost / 4, found.gain)  # of its three inputs and its output


def _of_fp32(dtype: torch.dtype) -> float:
    def run(kind: torch.dtype, width: int) -> None:
        matrix = matrices[kind]
        torch.mm(matrix, matrix)

    matrices = {kind: torch.ones(_WIDTH, _WIDTH, dtype=kind) for kind in (torch.float32, dtype)}
    return Bargain.ratio(run, (torch.float32, dtype), _WIDTH)

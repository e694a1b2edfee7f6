"""Arguments that scripts rarely give an operator: of which each gives one more case, as it is and with gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

import torch

from accelcore.testing.support.case import COMPLEX, ENDS, FROZEN, INFINITE, LARGE, OTHERWISE
from accelcore.testing.support.coverage import arguments_of, joined, of_other_options
from accelcore.testing.support.layouts import mapped, multiplied, tensors, with_ends, with_infinity
from accelcore.testing.support.samples import CONVERTS, ROUGH, samples

_MOST_LEAVES = 3  # of which each set is frozen
_BEYOND_WHOLE = 2.0**36  # what an integer of 32 bits cannot hold
_COUNTS_UP = ("gamma", "zeta")  # whose kernels take a step for each whole number below 0


@dataclass(frozen=True)
class Rare:
    """An operator, its arguments, and in words what is rare about them."""

    info: Any
    dtype: torch.dtype
    arguments: Any
    what: str


def rare(name: str, info: Any, dtype: torch.dtype, every: list[Any], chosen: list[Any]) -> Iterator[Rare]:
    """Yield an operator's rare cases.

    Args:
        name, info: the operator and its OpInfo.
        dtype: fp32, or another one if it has no fp32.
        every: its samples.
        chosen: those of which others are compared already; if there are none, each option of torch's samples is rare.
    """
    if not chosen:
        for arguments in of_other_options(info, dtype, every, []):
            yield Rare(info, dtype, arguments, OTHERWISE)
    for arguments in joined(info, dtype, every):
        yield Rare(info, dtype, arguments, OTHERWISE)
    if name in ROUGH or not every:
        return
    yield from _with_frozen_inputs(info, dtype, every)
    if dtype == torch.float32 and not any(each in name for each in _COUNTS_UP):
        yield from _of_numbers(info, every)
    known = info.supported_dtypes("cpu")
    for kind in (torch.int8, torch.uint8):
        if kind in known:
            ends = filter(None, (with_ends(arguments_of(sample)) for sample in samples(info, kind)))
            yield from (Rare(info, kind, arguments, ENDS) for arguments in islice(ends, 1))
    if torch.complex64 in known and name not in CONVERTS:
        for arguments in islice(of_other_options(info, torch.complex64, samples(info, torch.complex64), []), 2):
            yield Rare(info, torch.float32, arguments, COMPLEX)


def _of_numbers(info: Any, every: list[Any]) -> Iterator[Rare]:
    """Yield operands beyond whole numbers of 32 bits, and infinities among the operands but the first."""
    kind = type(info).__name__
    if kind not in ("UnaryUfuncInfo", "BinaryUfuncInfo"):
        return
    given = arguments_of(max(every, key=_elements))
    if (changed := multiplied(given, _BEYOND_WHOLE)) is not None:
        yield Rare(info, torch.float32, changed, LARGE)
    if kind == "BinaryUfuncInfo":
        (first, *others), options = given
        for what, infinity in INFINITE.items():
            if others and (changed := with_infinity(((others[0], first), {}), infinity)) is not None:
                yield Rare(info, torch.float32, ((first, changed[0][0], *others[1:]), options), what)


def _with_frozen_inputs(info: Any, dtype: torch.dtype, every: list[Any]) -> Iterator[Rare]:
    """Yield the sample of most arguments with every set of them that needs gradients, but none and all."""
    given = arguments_of(max(every, key=lambda sample: len(tensors(arguments_of(sample)))))
    leaves = [number for number, each in enumerate(tensors(given)) if each.requires_grad]
    for count in range(1, len(leaves)) if len(leaves) <= _MOST_LEAVES else ():
        for frozen in combinations(leaves, count):
            yield Rare(info, dtype, _frozen(given, frozen), FROZEN)


def _frozen(arguments: Any, numbers: tuple[int, ...]) -> Any:
    places = {id(tensors(arguments)[number]) for number in numbers}
    return mapped(lambda each: each.detach() if id(each) in places else each, arguments)


def _elements(sample: Any) -> int:
    return min([each.numel() for each in tensors(arguments_of(sample))], default=0)

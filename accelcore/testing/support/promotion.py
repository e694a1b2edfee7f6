"""Operands of several dtypes: of which dtype and value their result is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor

from accelcore.testing.support.case import Case
from accelcore.testing.support.coverage import arguments_of
from accelcore.testing.support.found import OTHERWISE, Found, Variant, is_refusal
from accelcore.testing.support.layouts import mapped, placed, tensors
from accelcore.testing.support.samples import OF_ITS_INPUT, SAMPLED, samples

_SWITCH = (False, True)


def compare_dtypes(found: Found, device: torch.device, name: str, info: Any, dtypes: list[torch.dtype]) -> None:
    """Note where operands of two of the dtypes give a result of another dtype or value than torch says."""
    if type(info).__name__ == "BinaryUfuncInfo":
        cases = _of_two_dtypes(dtypes)
    elif name in SAMPLED and dtypes and name not in OF_ITS_INPUT:
        cases = _of_several_dtypes(dtypes, samples(info, dtypes[-1]))
    else:
        return
    for arguments in cases:
        what = " and ".join(_described(each) for each in arguments[0])
        results = list[list[torch.dtype]]()
        try:
            for place in (torch.device("meta"), device):
                given, options = placed(arguments, place, "")
                results.append([each.dtype for each in tensors(info.op(*given, **options))])
        except Exception as error:  # noqa: BLE001  a device raises errors of any kind
            if results and not is_refusal(error):
                found.refused.append(f"{name} of {what}: {type(error).__name__}: {error}")
            continue
        if results[0] != results[1]:
            found.note(f"{name}, {what}: {results[1]}, not {results[0]}")
        elif results[0][0].is_floating_point and not name.startswith("nn.functional."):  # these round on the way
            Case(found, device, name, Variant(info, results[0][0], arguments, OTHERWISE)).run()


def _of_two_dtypes(dtypes: list[torch.dtype]) -> Iterator[Any]:
    """Yield a tensor with a number, and with a tensor without dimensions of another dtype, in all of their digits."""
    pairs = list(permutations(dtypes, 2))
    operands: list[tuple[Any, Any]] = [(_third(2).to(one), _third().to(other)) for one, other in pairs]
    operands += [(other, one) for one, other in operands]
    operands += [(_third(2).to(one), _third(2).to(other)) for one, other in pairs]
    operands += [(torch.ones(2, dtype=one), other) for one in [*dtypes, torch.int64] for other in (True, 2, 0.5)]
    yield from ((given, {}) for given in operands)


def _third(*shape: int) -> Tensor:
    return torch.full(shape, 4 / 3)


def _of_several_dtypes(dtypes: list[torch.dtype], every: list[Any]) -> Iterator[Any]:
    """Yield the sample of most tensors with one of them, as it is and without dimensions, of another dtype."""
    given = max(map(arguments_of, every), key=lambda each: len(_fractions(each)))
    places = [id(each) for each in _fractions(given)]
    for (one, other), place, alone in product(permutations(dtypes, 2), places if len(places) > 1 else (), _SWITCH):
        yield mapped(partial(_converted, places, place, one, _third().to(other) if alone else other), given)


def _converted(places: list[int], place: int, dtype: torch.dtype, other: Tensor | torch.dtype, value: Any) -> Any:
    if id(value) not in places:
        return value
    if id(value) != place:
        return value.detach().to(dtype)
    return other if isinstance(other, Tensor) else value.detach().to(other)


def _fractions(arguments: Any) -> list[Tensor]:
    return [each for each in tensors(arguments) if each.is_floating_point()]


def _described(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else str(value)

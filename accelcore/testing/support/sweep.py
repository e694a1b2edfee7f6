"""Comparison of a device's operators with the same operators in float64 on the CPU, on torch's own samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from accelcore.known_faults import KnownFault
from accelcore.testing.support.case import Case
from accelcore.testing.support.found import Found, Variant
from accelcore.testing.support.numbers import compare_numbers
from accelcore.testing.support.promotion import compare_dtypes
from accelcore.testing.support.rare import in_wider_dtypes, rare
from accelcore.testing.support.samples import ROUGH, operators
from accelcore.testing.support.variants import Variants

_MOST_WRONG = 4


def compare(
    device: torch.device, name: str, info: Any, dtypes: list[torch.dtype], count: int, faults: Sequence[KnownFault] = ()
) -> Found:
    """Compare an operator in each of the dtypes that it has on the CPU: values, gradients, in place and `out=`.

    Results have to share memory with arguments where those of the CPU do, and nowhere else.

    It seeds torch's generators, which some operators do themselves; the caller restores them.

    Args:
        device: where to run it.
        name, info: the operator and its OpInfo.
        dtypes: what to try; an operator that has none of them is run in one dtype that it has. With float64, which is
            the oracle's, only results that are asked for in it are compared.
        count: how many of its samples to run in each dtype; twice as many in fp32, and one of whole numbers.
        faults: the device's known bugs.
    """
    found, known = Found(faults), info.supported_dtypes("cpu")
    tried = [dtype for dtype in dtypes if dtype == torch.float32 or (dtype != torch.float64 and name not in ROUGH)]
    alone = compare_numbers(found, device, name, info, tried, count - 1)
    for dtype in [dtype for dtype in tried if dtype in known] or sorted(known, key=str)[:1]:
        of = Variants(name, info, dtype, count, alone)
        _run(found, device, name, of.usual())
        if len(found.wrong) > _MOST_WRONG:
            return found
        for variants in (
            of.low(), of.large_and_small(), of.rare(), of.many(), of.of_other_memory(), of.pairs(),
            of.with_shared_dimensions(), of.with_numbers(), of.second_derivatives(), of.not_finite(),
        ):  # fmt: skip
            _run(found, device, name, variants)
    _run(found, device, name, in_wider_dtypes(name, info, dtypes))
    compare_dtypes(found, device, name, info, [each for each in tried if each.is_floating_point and each in known])
    return found


def compare_options(
    device: torch.device,
    names: Sequence[str],
    dtypes: Sequence[torch.dtype] = (),
    faults: Sequence[KnownFault] = (),
    *,
    brief: bool = False,
) -> Found:
    """Compare operators on samples that show each of their options, many elements, and each of `dtypes`; see `compare`.

    The options are those in fp32, or in another dtype of an operator that has no fp32. If it is `brief`, one layout
    stands for the others, as in `rare`.
    """
    found = Found(faults)
    for name in names:
        info = operators()[name]
        known = info.supported_dtypes("cpu")
        for dtype in sorted(known, key=lambda each: (each != torch.float32, str(each)))[:1]:
            of = Variants(name, info, dtype, 1)
            _run(found, device, name, rare(name, info, dtype, of.every, [], brief=brief))
            _run(found, device, name, of.much(brief=brief))
        _run(found, device, name, in_wider_dtypes(name, info, dtypes))
        alone = compare_numbers(found, device, name, info, [*dict.fromkeys((torch.float32, *dtypes))], 1)
        for dtype in dtypes:
            if dtype in known and dtype not in (torch.float32, torch.float64):
                _run(found, device, name, Variants(name, info, dtype, 1, alone).typical())
    return found


def _run(found: Found, device: torch.device, name: str, variants: Iterable[Variant]) -> None:
    for variant in variants:
        Case(found, device, name, variant).run()
        if len(found.wrong) > _MOST_WRONG:
            return

"""Conformance of random whole numbers: each is drawn alike, or by its weight."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from accelcore import Backend
from accelcore.testing.support.declared import refused
from accelcore.testing.support.statistics import COUNT, SIGMAS, correlation, is_off
from accelcore.util.text import first_line

_PARTS = 16
_SIDE, _SHUFFLES = 4, 1000  # of short permutations

# Three quarters of what 8, 16 and 24 bits hold: modulo that, the lower third of the numbers comes twice as often.
_BYTES, _SHORT, _LONG = 3 * 2**6, 3 * 2**14, 3 * 2**22
_WEIGHTS = 3 * 2**12  # more than bf16 can add up
_EVEN: dict[str, tuple[int, Callable[[torch.device], Tensor]]] = {
    "randint": (_BYTES, lambda device: torch.randint(0, _BYTES, (COUNT,), device=device)),
    "randint of 16 bits": (
        _SHORT,
        lambda device: torch.randint(-_SHORT // 2, _SHORT // 2, (COUNT,), device=device) + _SHORT // 2,
    ),
    "randint of 24 bits": (_LONG, lambda device: torch.randint(0, _LONG, (COUNT,), device=device)),
    "random_ of 16 bits": (
        _SHORT,
        lambda device: torch.empty(COUNT, device=device, dtype=torch.int32).random_(_SHORT),
    ),
    "multinomial": (
        _WEIGHTS,
        lambda device: torch.multinomial(torch.ones(_WEIGHTS, device=device), COUNT, replacement=True),
    ),
}
"""How many whole numbers there are from 0 on, and a draw of them."""


class WholeDrawTests:
    """Random whole numbers of the device."""

    @pytest.mark.parametrize("draw", _EVEN)
    def test_even_draws(self, accel: Backend, draw: str) -> None:
        """Each whole number of a range is drawn alike, and all of them are."""
        accel.runtime.seed(28)
        size, make = _EVEN[draw]
        try:
            drawn = make(accel.device).cpu().double()
        except (NotImplementedError, RuntimeError) as error:
            refused(f"{draw} of {size} numbers: {first_line(error)}")
        assert float(drawn.min()) >= 0, f"{draw} drew a number below its range"
        assert float(drawn.max()) < size, f"{draw} drew a number above its range"
        share = 1 / _PARTS
        for part, count in enumerate(torch.histc(drawn, _PARTS, 0, size).tolist()):
            assert not is_off(count, COUNT * share, math.sqrt(COUNT * share * (1 - share))), (
                f"{draw} of {size} numbers draws {count:.0f} of {COUNT} in part {part} of {_PARTS}, not "
                f"{COUNT * share:.0f}"
            )
        times = COUNT / size  # that each number is drawn, on average
        never = math.exp(-times)
        deviation = 1 + math.sqrt(size * never * max(0.0, 1 - (1 + times) * never))
        different, expected = len(drawn.unique()), size * (1 - never)
        assert not is_off(different, expected, deviation), (
            f"{draw} of {size} numbers draws {different} different ones, not {expected:.0f}"
        )

    def test_whole_numbers(self, accel: Backend) -> None:
        """randint draws each number alike, randperm each once, multinomial by weight and without repeats."""
        accel.runtime.seed(15)
        counts = torch.bincount(torch.randint(0, 100, (COUNT,), device=accel.device).cpu(), minlength=100)
        assert len(counts) == 100, "randint drew a number outside its range"
        assert not any(is_off(count, COUNT / 100, math.sqrt(COUNT / 100)) for count in counts.tolist())
        order = torch.randperm(COUNT, device=accel.device).cpu()
        assert torch.equal(order.sort().values, torch.arange(COUNT)), "randperm draws no permutation"
        assert abs(correlation(order.double(), torch.arange(COUNT).double())) < SIGMAS, "randperm hardly permutes"
        short = torch.stack([torch.randperm(_SIDE, device=accel.device) for _ in range(_SHUFFLES)]).cpu()
        share = 1 / _SIDE
        for number in range(_SIDE):
            for times in (short == number).sum(0).tolist():
                assert not is_off(times, _SHUFFLES * share, math.sqrt(_SHUFFLES * share * (1 - share))), (
                    f"randperm puts {number} in one place {times} times of {_SHUFFLES}"
                )
        weights = torch.tensor([0.0, 1.0, 3.0], device=accel.device)
        found = torch.bincount(torch.multinomial(weights, COUNT, replacement=True).cpu(), minlength=3).tolist()
        assert found[0] == 0, "multinomial drew what has no weight"
        assert not is_off(found[2], 0.75 * COUNT, math.sqrt(0.1875 * COUNT)), "multinomial does not go by weight"
        rows = torch.arange(64, device=accel.device).reshape(8, 8) % 2.0
        for chances in (rows, rows.t(), rows[:, 3:6]):
            for drawn in (torch.bernoulli(chances), torch.empty_like(chances).bernoulli_(chances)):
                assert torch.equal(drawn, chances), "bernoulli does not go by the chance of each element"
        for count in (100, _WEIGHTS):
            several = torch.multinomial(torch.ones(count, device=accel.device), count).cpu()
            assert len(several.unique()) == count, f"multinomial of {count} numbers without replacement repeats"
        pairs = torch.multinomial(torch.tensor([0.1, 0.3, 0.6], device=accel.device).expand(20_000, 3), 2).cpu()
        left = torch.bincount(3 - pairs.sum(1), minlength=3).tolist()
        for times, share in zip(torch.bincount(pairs[:, 0], minlength=3).tolist(), (0.1, 0.3, 0.6), strict=True):
            deviation = math.sqrt(20_000 * share * (1 - share))
            assert not is_off(times, 20_000 * share, deviation), "without replacement the first does not go by weight"
        for index, (one, other) in enumerate(((0.3, 0.6), (0.1, 0.6), (0.1, 0.3))):
            share = one * other / (1 - one) + other * one / (1 - other)
            deviation = math.sqrt(20_000 * share * (1 - share))
            assert not is_off(left[index], 20_000 * share, deviation), "without replacement it does not go by weight"

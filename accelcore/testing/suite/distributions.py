"""Conformance of random numbers by their distribution: each is a probability, which is to be drawn evenly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import pytest
import torch
from torch import Tensor

from accelcore import Backend
from accelcore.testing.support.declared import refused
from accelcore.testing.support.layouts import laid_out
from accelcore.testing.support.statistics import SIGMAS, correlation, is_off
from accelcore.util.text import first_line

_LONG = 20_011  # numbers by each parameter: no multiple of what a kernel draws at once
_STEPS = 3.5  # a distribution function is further away, times the root of the count, once in 2e10
_RARE = 25.0  # no number lies among the last 25 parts of all, on average, once in 7e10
_LARGEST = 512  # of whole numbers
_LAYOUTS, _OTHERS = ("", "transposed", "expanded"), ("strided", "transposed", "")
_OF_EVEN, _OF_ITS_SQUARE = 1 / 12, math.sqrt(1 / 80 - 1 / 144)  # variance of even numbers, deviation of its terms
_WITH_AN_END = ("rand_like", "uniform_")  # whose lower end may be drawn


@dataclass(frozen=True)
class _Distribution:
    """A distribution by a parameter.

    Attributes:
        parameters: the values to draw by, each for many numbers. They are exact in every dtype.
        draw: draws a number for each element of a tensor of parameters, which it may overwrite.
        below: returns the probability of at most a number, given numbers and parameters in float64; by default that of
            even numbers from 0 to 1.
        chances: returns the logarithms of the probabilities of whole numbers from 0 on, given a parameter, if only
            whole numbers are drawn.
    """

    parameters: tuple[float, ...]
    draw: Callable[[Tensor], Tensor]
    below: Callable[[Tensor, Tensor], Tensor] = lambda x, p: x
    chances: Callable[[Tensor, Tensor], Tensor] | None = None

    def probabilities(self, drawn: Tensor, parameters: Tensor) -> Tensor:
        """Return for each number a probability of less, or of as much: drawn evenly between both for whole numbers."""
        if self.chances is None:
            return self.below(drawn, parameters)
        assert bool((drawn == drawn.round()).all()), "fractions are among whole numbers"
        assert float(drawn.min()) >= 0, f"{float(drawn.min())} is among numbers from 0 on"
        found = list[Tensor]()
        within = torch.rand(drawn.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        for row, parameter, part in zip(drawn.long(), parameters[:, 0], within, strict=True):
            each = self.chances(torch.arange(_LARGEST + 1).double(), parameter).exp().nan_to_num(0.0)
            place = row.clamp(max=_LARGEST)
            found.append(each.cumsum(0)[place] - part * each[place])
        return torch.stack(found)


def _binomial(count: int) -> _Distribution:
    return _Distribution(
        (0.125, 0.25, 0.5, 0.75, 0.875),
        lambda p: torch.binomial(torch.full_like(p, count), p),
        chances=lambda k, p: (
            math.lgamma(count + 1) - (k + 1).lgamma() - (count - k.clamp(max=count) + 1).lgamma()
            + k * p.log() + (count - k) * (1 - p).log()
        ).masked_fill(k > count, -math.inf),
    )  # fmt: skip


def _bernoulli(draw: Callable[[Tensor], Tensor]) -> _Distribution:
    chances = (0.0078125, 0.25, 0.5, 0.75, 0.99609375)
    return _Distribution(
        chances, draw, chances=lambda k, p: torch.where(k == 0, 1 - p, torch.where(k == 1, p, 0)).log()
    )


def _of_normals(mean: Callable[[Tensor], Tensor], deviation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, p: torch.special.ndtr((x - mean(p)) / deviation(p))


def _filled(p: Tensor, value: float) -> Tensor:
    return torch.full_like(p, value, dtype=torch.float64)


_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
_ONCE = (1.0,) * len(_SCALES)
_DISTRIBUTIONS: dict[str, _Distribution] = {
    "rand_like": _Distribution(_ONCE, torch.rand_like),
    "randn_like": _Distribution(_ONCE, torch.randn_like, lambda x, p: torch.special.ndtr(x)),
    "uniform_": _Distribution(_ONCE, lambda p: p.uniform_(-1, 3), lambda x, p: (x + 1) / 4),
    "normal_": _Distribution(
        _ONCE, lambda p: p.normal_(5.0, 2.0), _of_normals(lambda p: _filled(p, 5.0), lambda p: _filled(p, 2.0))
    ),
    "normal by means": _Distribution(
        _SCALES, lambda p: torch.normal(p, 2.0), _of_normals(lambda p: p, lambda p: _filled(p, 2.0))
    ),
    "normal by deviations": _Distribution(
        _SCALES, lambda p: torch.normal(1.0, p), _of_normals(lambda p: _filled(p, 1.0), lambda p: p)
    ),
    "normal by both": _Distribution(
        _SCALES, lambda p: torch.normal(p, p / 2 + 1), _of_normals(lambda p: p, lambda p: p / 2 + 1)
    ),
    "exponential_": _Distribution(_ONCE, lambda p: p.exponential_(), lambda x, p: -torch.expm1(-x)),
    "exponential_ of rate 4": _Distribution(_ONCE, lambda p: p.exponential_(4.0), lambda x, p: -torch.expm1(-4 * x)),
    "log_normal_": _Distribution(
        _ONCE, lambda p: p.log_normal_(1.0, 0.25), lambda x, p: torch.special.ndtr((x.log() - 1) * 4)
    ),
    "cauchy_": _Distribution(_ONCE, lambda p: p.cauchy_(2.0, 0.5), lambda x, p: ((x - 2) * 2).atan() / math.pi + 0.5),
    "gamma": _Distribution(
        (0.5, 0.75, 1.0, 4.0, 20.0), torch._standard_gamma, lambda x, p: torch.special.gammainc(p, x)
    ),
    "dirichlet": _Distribution(
        (*_SCALES[1:], 8.0),
        lambda p: torch._sample_dirichlet(torch.stack([p, torch.ones_like(p)], -1))[..., 0],
        lambda x, p: x**p,
    ),
    "poisson": _Distribution(
        (0.25, 4.0, 100.0, 100.0, 100.0), torch.poisson, chances=lambda k, p: k * p.log() - p - (k + 1).lgamma()
    ),
    "geometric_": _Distribution(
        _ONCE,
        lambda p: p.geometric_(0.25),
        chances=lambda k, p: torch.where(k < 1, -math.inf, (k - 1) * math.log(0.75) + math.log(0.25)),
    ),
    "binomial of 1": _binomial(1), "binomial of 7": _binomial(7), "binomial of 100": _binomial(100),
    "bernoulli": _bernoulli(torch.bernoulli),
    "bernoulli_ by a tensor": _bernoulli(lambda p: torch.empty_like(p).bernoulli_(p)),
    "randint_like": _Distribution(
        _ONCE,
        lambda p: torch.randint_like(p, 3, 103),
        chances=lambda k, p: ((k >= 3) & (k < 103)).double().div(100).log(),
    ),
    "random_": _Distribution(
        _ONCE, lambda p: p.random_(3, 103), chances=lambda k, p: ((k >= 3) & (k < 103)).double().div(100).log()
    ),
}  # fmt: skip


def _laid_out(values: Tensor, device: torch.device, layout: str) -> Tensor:
    """Return a row of each value in a layout; expanded, each row is one number in memory."""
    if layout == "expanded":
        return values.to(device)[:, None].expand(-1, _LONG)
    return laid_out(values[:, None].expand(-1, _LONG).contiguous(), device, layout)


class DistributionTests:
    """Random numbers by the probability of less."""

    @pytest.mark.parametrize("draw", _DISTRIBUTIONS)
    def test_distributions(self, accel: Backend, draw: str) -> None:
        """Numbers have their distribution to its ends, for each element's own parameter, in any dtype and strides."""
        accel.runtime.seed(37)
        distribution = _DISTRIBUTIONS[draw]
        names = sorted(accel.capabilities.model_dtypes, key="float32".__ne__)
        dtypes = [getattr(torch, name) for name in names]
        for dtype, layout in chain(
            ((torch.float32, each) for each in _LAYOUTS), zip(dtypes[1:], _OTHERS, strict=False)
        ):
            values = torch.tensor(distribution.parameters, dtype=dtype)
            given = _laid_out(values, accel.device, layout)
            given = given.clone() if draw.endswith("_") or "_ of" in draw else given
            try:
                drawn = distribution.draw(given).cpu().double()
            except (NotImplementedError, RuntimeError) as error:
                if dtype == torch.float32:
                    refused(f"{draw}: {first_line(error)}")
                continue
            found = distribution.probabilities(drawn, values.double()[:, None].expand(-1, _LONG))
            what = f"{draw} in {dtype}, {layout or 'as it is'}"
            _check(found, torch.finfo(dtype).eps, what)
            positive = dtype == torch.float32 and distribution.chances is None and draw not in _WITH_AN_END
            assert not positive or float(found.min()) > 0, f"{what}: {float(drawn.min())} was drawn"


def _check(probabilities: Tensor, eps: float, what: str) -> None:
    """Check that probabilities are even in all of a tensor, its parts and rows, but for rounding, and independent."""
    for values in (probabilities.flatten().sort().values, *probabilities.sort().values):
        count = len(values)
        off = float((values - (torch.arange(count).double() + 0.5) / count).abs().max())
        assert off <= _STEPS / math.sqrt(count) + 2 * eps, f"{what}: a share of the numbers is off by {off:.4f}"
        for end, share in (("lower", float(values[0])), ("upper", 1 - float(values[-1]))):
            assert share <= _RARE / count + 2 * eps, f"{what}: the {end} {share:.5f} of the distribution is not drawn"
    for part in (probabilities, probabilities[:, ::2], probabilities[:, : _LONG // 2], *probabilities):
        mean, spread, root = float(part.mean()), float((part - 0.5).square().mean()), math.sqrt(part.numel())
        assert abs(mean - 0.5) <= SIGMAS * math.sqrt(_OF_EVEN) / root + 2 * eps, f"{what}: the mean is off"
        assert abs(spread - _OF_EVEN) <= SIGMAS * _OF_ITS_SQUARE / root + eps, f"{what}: the variance is off"
    for dimension in range(2):
        length = probabilities.shape[dimension] - 1
        one, other = (probabilities.narrow(dimension, start, length).flatten() for start in (0, 1))
        assert not is_off(correlation(one, other), 0.0, 1.0), f"{what}: neighbours along {dimension} are correlated"

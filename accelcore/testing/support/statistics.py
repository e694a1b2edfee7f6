"""Bounds on the statistics of random numbers, each of which a right generator exceeds with a probability below 1e-9."""

from __future__ import annotations

import math

import torch
from torch import Tensor

COUNT = 100_003  # no multiple of what a kernel draws at once
SIGMAS = 6.5  # a normal number is beyond it once in 1e10
SIGMAS_OF_ANY = 8.5  # one of 2e5 normal numbers is beyond it once in 1e11


def is_off(found: float, expected: float, deviation: float) -> bool:
    """Return whether a statistic is further from its expectation than chance explains, or is NaN."""
    return not abs(found - expected) <= SIGMAS * deviation


def correlation(one: Tensor, other: Tensor) -> float:
    """Return the correlation of two draws in units of its standard deviation."""
    one, other = one - one.mean(), other - other.mean()
    return float((one * other).sum() / (one.norm() * other.norm())) * math.sqrt(len(one))


def largest_correlation(one: Tensor, other: Tensor) -> float:
    """Return the largest correlation of two draws that are moved against each other by any number of elements."""
    one, other = one - one.mean(), other - other.mean()
    parts = [torch.fft.rfft(each, 2 ** (2 * len(one)).bit_length()) for each in (one, other)]
    sums = torch.fft.irfft(parts[0] * parts[1].conj()).abs()
    if torch.equal(one, other):
        sums[0] = 0.0  # of each element with itself
    return float(sums.max() / (one.norm() * other.norm())) * math.sqrt(len(one))

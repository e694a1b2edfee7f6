"""Both directions of a declaration: what is declared must work, what is not must be refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from accelcore.errors import UnsupportedError

__all__ = [
    "DIVIDING",
    "FAST_FP32",
    "LOW_PRECISION",
    "MODEL_DTYPES",
    "MOST_BITS",
    "NOT_DECLARED",
    "SHARDING",
    "STRATEGIES",
    "TABLES",
    "declared",
]

# What the suite knows to test. A declaration may name nothing else: nobody could rely on it.
LOW_PRECISION = ("bfloat16", "float16")
MODEL_DTYPES = ("float32", "float64", "bfloat16", "float16")
TABLES = ("torch", "O1")
SHARDING = ("fsdp", "zero2", "zero3")
DIVIDING = ("zero1", *SHARDING)
STRATEGIES = ("none", "ddp", "combine_ddp", *DIVIDING)
MOST_BITS = 16
"""So many bits of a fraction are looked at."""
FAST_FP32 = {"tf32": (10, 10), "hf32": (10, 12), "bf16": (7, 7), "fp32": (MOST_BITS, MOST_BITS)}
"""Formats behind `fp32="fast"`: how many bits of their fraction the factors of a product keep, at least and at most."""

NOT_DECLARED = "not declared, and refused: "
"""How the reason of a skipped test begins, where a backend refused what it does not declare."""


@contextmanager
def declared(condition: bool, what: str) -> Iterator[None]:
    """Run a block that asks a backend for `what`, which it declares where `condition` holds.

    Where it does not hold, the block must raise `UnsupportedError`: the test is then skipped. Any other end is a
    failure, an unexpected success too: a declaration that nobody can rely on is worth nothing.
    """
    if condition:
        yield
        return
    try:
        yield
    except UnsupportedError as refusal:
        pytest.skip(NOT_DECLARED + f"{what} ({refusal.what})")
    except AssertionError as error:
        raise AssertionError(f"unexpected success: {what} is not declared, and is not refused") from error
    except Exception as error:
        raise AssertionError(
            f"{what} is not declared, and asking for it raised {type(error).__name__} instead of UnsupportedError"
        ) from error
    pytest.fail(f"unexpected success: {what} is not declared, and works")

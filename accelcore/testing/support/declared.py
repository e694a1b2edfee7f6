"""Both directions of a declaration: declared features must work, others must be refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest

from accelcore.devices import SHARDED
from accelcore.errors import UnsupportedError

# Words that the suite can test. A declaration may contain no others.
LOW_PRECISION = ("bfloat16", "float16")
MODEL_DTYPES = ("float32", "float64", "bfloat16", "float16")
TABLES = ("torch", "O1")
DIVIDING = ("zero1", *SHARDED)
STRATEGIES = ("none", "ddp", "combine_ddp", *DIVIDING)
MOST_BITS = 16
"""Number of fraction bits that are tested."""
FAST_FP32 = {"tf32": (10, 10), "hf32": (10, 12), "bf16": (7, 7), "fp32": (MOST_BITS, MOST_BITS)}
"""Formats behind `fp32="fast"`: how many bits of their fraction the factors of a product keep, at least and at most."""

NOT_DECLARED = "not declared, and refused: "
"""Beginning of the skip reason if a backend refused a feature that it does not declare."""


def refused(what: str) -> NoReturn:
    """Skip a test of what a backend may refuse: another kernel, or another dtype; `what` says what it refuses."""
    pytest.skip(f"this backend refuses it, which is allowed: {what}")


@contextmanager
def declared(condition: bool, what: str) -> Iterator[None]:
    """Run a block that asks a backend for `what`, which it declares if `condition` holds.

    If it does not hold, the block must raise `UnsupportedError`, and the test is skipped. Any other end fails the
    test, also a success: users could not rely on the declaration.
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

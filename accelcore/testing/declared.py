"""Both directions of a declaration: what is declared must work, what is not must be refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from accelcore.errors import UnsupportedError

__all__ = ["NOT_DECLARED", "declared"]

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
    except Exception as error:
        raise AssertionError(
            f"{what} is not declared, and asking for it raised {type(error).__name__} instead of UnsupportedError"
        ) from error
    pytest.fail(f"unexpected success: {what} is not declared, and works")

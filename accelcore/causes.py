"""What led to an error, as a traceback shows it."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["causes"]


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and after it those that it was raised from or in the handling of, the latest first."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in found:
        found.append(cause)
        yield cause
        cause = cause.__cause__ if cause.__suppress_context__ else cause.__context__

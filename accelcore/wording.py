"""Words that several messages have in common."""

from __future__ import annotations

__all__ = ["kind_of"]


def kind_of(value: object) -> str:
    """What a value is, for a message: `an int`, `a list`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"

"""Words that several messages have in common."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["did_you_mean", "kind_of", "nearest"]


def kind_of(value: object) -> str:
    """What a value is, for a message: `an int`, `a list`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that an unknown one is nearly; None where there is none.

    Only one that begins alike: of short words that do not, letters in common say nothing.
    """
    alike = [name for name in known if name[:1].lower() == word[:1].lower()]
    return next(iter(get_close_matches(word, alike, n=1)), None)


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """A remedy for an unknown word: the nearest known one, where there is one, and what else to do."""
    near = nearest(word, known)
    if near is None:
        return otherwise
    return f"did you mean {near!r}?" + (f" Else {otherwise}" if otherwise else "")

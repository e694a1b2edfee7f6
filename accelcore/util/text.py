"""Text of messages, checks of numbers that many options share, and of arguments that a function takes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard


def is_whole(value: object, least: int = 0) -> TypeGuard[int]:
    """Return whether a value is an int of at least `least`. A bool is not an int here."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is an int or a float. A bool is neither here."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def text_remedy(value: object, *, whole: bool = False) -> str:
    """Return what to write for text that begins as a number does; nothing for any other value.

    `whole`: whether only a whole number is taken.
    """
    if not isinstance(value, str) or not value.strip("+-. ")[:1].isdigit():
        return ""
    kind = "int" if value.strip().isdecimal() else "float"
    try:
        float(value)
    except ValueError:  # such as 10k or 5%
        return "this is text: write a number"
    if whole and kind == "float":
        return "this is text: write a whole number, such as int('4')"
    giver = "YAML for 1e-3" if "e" in value.lower() else "a command line"
    return f"this is text, as {giver} gives it: write {kind}({value!r})"


def bound(function: Callable[..., Any], *arguments: Any, **named: Any) -> inspect.BoundArguments | None:
    """Bind arguments to the parameters of a function; return None if it cannot be called with them."""
    try:
        return inspect.signature(function).bind(*arguments, **named)
    except TypeError:
        return None
    except ValueError:  # a builtin has no signature
        return inspect.signature(lambda *_, **__: None).bind(*arguments, **named)


def kind_of(value: object) -> str:
    """Return the name of a value's class with its article, `an int` or `a list`; or `None`."""
    name = type(value).__name__
    if value is None:
        return "None"
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def repr_of(value: object) -> str:
    """Return a value's repr without addresses, so that equal values have equal texts in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def first_line(text: object) -> str:
    """Return the first line of an error or another text that is not blank, or nothing."""
    return str(text).strip().split("\n", 1)[0]


def shown(text: str, limit: int = 60) -> str:
    """Quote a text for a message: printable whatever it holds, and short."""
    return ascii(text) if len(text) <= limit else f"{text[:limit]!a}... ({len(text)} characters)"


def ranks(numbers: Iterable[int]) -> str:
    """Return ranks as text: `rank 1`, `ranks 0, 2 and 3`."""
    *rest, last = map(str, sorted(numbers))
    return f"ranks {', '.join(rest)} and {last}" if rest else f"rank {last}"

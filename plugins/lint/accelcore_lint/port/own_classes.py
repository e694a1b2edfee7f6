"""Classes of a project that define `cuda` themselves, and those that are torch's modules."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator

from accelcore_lint.port.vendors import DEVICES

_CLASS = re.compile(r"(?m)^[ \t]*class[ \t]+(\w+)[ \t]*(?:\(([^()]*(?:\([^()]*\)[^()]*)*)\))?[ \t]*:")
_MOVES = re.compile(rf"(?m)^[ \t]+def ({'|'.join(DEVICES)})\(")
_TAKES = re.compile(rf"\bdef ({'|'.join(DEVICES)})\((?!\s*\w+\s*\))")
_ALIAS = re.compile(
    rf"(?m)^([ \t]+)def ({'|'.join(DEVICES)})\(self(?:, *(\w+)[^(),]*)?\)[^:\n]*:[ \t]*\n"
    r"(?:\1[ \t]+r?(\"\"\"|\'\'\')(?:(?!\4)[\s\S])*\4[ \t]*\n)?"
    r"\1[ \t]+(?P<returns>return )?self\.to\((?!\))(?:device *= *)?(?:\w+\.device\()?"
    r"(?:\3(?: if \3 is not None else| or)? *)?"
    r"(?:f?[\"']\2(?::0|:\{\3\})?[\"'](?:, *\3)?)?\)?\)[ \t]*(?:\n|\Z)(?!\1[ \t])"
)
"""A method `cuda` with one parameter that only gives a device to the object's own `to`, which may as well be called."""

_FUNCTION = re.compile(r"(?m)^([ \t]*)def[ \t]+(\w+)\(([^)]*)\)[^\n]*\n((?:\1[ \t]+.*(?:\n|\Z)|[ \t]*\n)*)")
"""A function: its indentation, name, parameters and body."""

_MADE = re.compile(r"(?m)^def[ \t]+(\w+)|(?:(?<![\w.])((?:\w+\.)*\w+)[ \t]*=|^[ \t]+return\b)[ \t]*(?:\w+\.)*(\w+)\(")
_PLAIN_BASES = ("object", "ABC")


def own_moves(texts: Collection[str], defines: Callable[[str], object] = _MOVES.search) -> frozenset[str]:
    """Return the names of classes that define `cuda`, or inherit it, and of what makes and what holds their objects.

    `defines` may ask for another method.
    """
    found: set[str] = set()
    edges: list[tuple[str, str]] = []  # a name, and another that makes its objects, or is its base
    for text in texts if any(map(defines, texts)) else ():
        for name, bases, body in _classes(text):
            edges += [(name, base) for base in bases]
            found |= {name} if defines(body) else set()
        edges += _holders(text)
    return frozenset(_grown(found, edges))


def has_silent_to(text: str) -> bool:
    """Return whether a method `to` in a text returns nothing, unlike those of tensors and modules."""
    return any(
        name == "to" and "self" in params and re.search(r"\b(return|yield)\b", body) is None
        for _, name, params, body in _FUNCTION.findall(text)
    )


def without_aliases(text: str) -> str:
    """Return a file without the methods `cuda` that only call the object's own `to`, and return what that does."""
    if "self.to(" not in text:
        return text
    ends = [0, *(each.start() for each in _CLASS.finditer(text)), len(text)]
    return "".join(_without_alias(text[start:end]) for start, end in itertools.pairwise(ends))


def _without_alias(text: str) -> str:
    """Return a class without such methods. One without `return` is an alias if `to` returns nothing, too."""
    is_silent = has_silent_to(text)
    return _ALIAS.sub(lambda found: "" if found["returns"] or is_silent else found[0], text)


def movers(text: str) -> list[str]:
    """Return the classes of a file that define `cuda`, apart from aliases of `to`."""
    text = without_aliases(text)
    return [name for name, _, body in _classes(text) if _MOVES.search(body)] if _MOVES.search(text) else []


def _grown(found: set[str], edges: list[tuple[str, str]]) -> set[str]:
    """Return names with all that edges lead to, from the second name of one to its first."""
    while new := {name for name, source in edges if source in found} - found:
        found = found | new
    return found


def has_strange_moves(text: str) -> bool:
    """Return whether a class that names no module as its base defines `cuda`."""
    return any(_MOVES.search(body) and not _is_module(bases) for _, bases, body in _classes(text))


def _is_module(bases: Collection[str]) -> bool:
    return any(base.endswith("Module") for base in bases)


def takes_arguments(text: str) -> bool:
    """Return whether a method `cuda` that a file defines takes more than its object."""
    return _TAKES.search(text) is not None


def returns_something(text: str) -> bool:
    """Return whether a method `cuda` that a file defines may return something, or is not written as a plain method."""
    plain = [body for _, name, _, body in _FUNCTION.findall(text) if name in DEVICES]
    return len(plain) != len(_MOVES.findall(text)) or any(re.search(r"\b(return|yield)\b", body) for body in plain)


def torch_modules(texts: Collection[str]) -> frozenset[str]:
    """Return the classes that are modules of torch in each of their definitions, and have no `cuda` of their own."""
    bases: dict[str, list[list[str]]] = defaultdict(list)
    for text in texts if any(map(_MOVES.search, texts)) else ():
        for name, names, body in _classes(text):
            bases[name].append(["its own"] if _MOVES.search(body) else names)
    found: set[str] = {"Module"} - set(bases)
    grown = -1
    while grown != len(found):
        grown = len(found)
        for name, made in bases.items():
            if all(set(names) <= {*found, *_PLAIN_BASES} and set(names) & found for names in made):
                found.add(name)
    return frozenset(found - {"Module"})


def _classes(text: str) -> Iterator[tuple[str, list[str], str]]:
    """Yield the classes of a file: the name, the last names of the bases, and what follows until the next class."""
    made = list(_CLASS.finditer(text))
    ends = [*(following.start() for following in made[1:]), len(text)]
    for each, end in zip(made, ends, strict=False):
        bases = [base.strip().split(".")[-1] for base in (each[2] or "").split(",") if base.strip()]
        yield each[1], bases, text[each.end() : end]


def _holders(text: str) -> Iterator[tuple[str, str]]:
    """Yield names with the functions whose results they hold; a function that returns such a result is one, too."""
    function = ""
    for found in _MADE.finditer(text):
        if found[1]:
            function = found[1]
        elif found[3]:
            yield found[2].split(".")[-1] if found[2] else function, found[3]

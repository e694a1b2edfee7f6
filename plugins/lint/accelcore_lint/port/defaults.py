"""Parameters that are always a type of one vendor's tensors: their default, which no call of the project replaces."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

_TYPE = re.compile(r"(?m)^(\w+) *= *torch\.cuda\.\w+Tensor if\b")


def typed_defaults(texts: Collection[str]) -> frozenset[tuple[str, str]]:
    """Return functions with such parameters, if each use of the function in the project is a call of it by its name."""
    found = {each for text in texts if _TYPE.search(text) for each in _parameters(text)}
    given = {
        (function, parameter)
        for function, parameter, place in found
        if any(_may_give(text, function, parameter, place) for text in texts if function in text)
    }
    return frozenset({(function, parameter) for function, parameter, _ in found} - given)


def _parameters(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield the functions of a file with the parameters that have such a default, and their places."""
    types = set(_TYPE.findall(text))
    for made in _parsed(text).body:
        if isinstance(made, ast.FunctionDef) and not made.decorator_list:
            given = made.args.posonlyargs + made.args.args
            first = len(given) - len(made.args.defaults)
            for place, default in enumerate(made.args.defaults, first):
                if isinstance(default, ast.Name) and default.id in types:
                    yield made.name, given[place].arg, place


def _may_give(text: str, function: str, parameter: str, place: int) -> bool:
    """Return whether a file may give a function a value for a parameter, or may hand the function itself on."""
    module = _parsed(text)
    nodes = list(ast.walk(module))
    uses = [each for each in nodes if function in (getattr(each, "id", None), getattr(each, "attr", None))]
    calls = [each for each in nodes if isinstance(each, ast.Call) and each.func in uses]
    renamed = any(isinstance(each, ast.alias) and each.name == function and each.asname for each in nodes)
    return (
        not module.body
        or renamed
        or len(calls) != len(uses)
        or any(
            len(call.args) > place
            or any(isinstance(arg, ast.Starred) for arg in call.args)
            or any(word.arg in (None, parameter) for word in call.keywords)
            for call in calls
        )
    )


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])

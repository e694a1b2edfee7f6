"""What TorchScript compiles, or may compile, as the source of a file tells: such code can ask for no device."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from functools import lru_cache

COMPILES = re.compile(r"\bjit\.(script|script_method|export)\b|\bscript_method\b")
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def compiled_in(texts: Collection[str]) -> frozenset[str]:
    """Return what these files of one program compile: `"scripted NAME"`, and `"scripted"` if that may be a module.

    The names are those of functions and classes that are compiled, and of those that they call. If modules are, they
    are also those that modules call outside of their constructors. Comments and strings compile nothing.
    """
    found = frozenset(mark for text in texts for mark in _scripted_in(text))
    return found | {mark for text in texts for mark in _called_by_modules(text)} if "scripted" in found else found


@lru_cache(maxsize=64)
def _scripted_in(text: str) -> frozenset[str]:
    if not COMPILES.search(text) or (tree := _tree(text)) is None:
        return frozenset()
    own = {node.name for node in tree.body if isinstance(node, _FUNCTION)}
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith("jit.script"):
            given = ast.unparse(node.args[0])
            found |= {given.rpartition(".")[2]} if re.fullmatch(r"[\w.]+", given) else set()
            found |= set() if given in own else {""}
        elif isinstance(node, (*_FUNCTION, ast.ClassDef)) and any(map(_is_mark, node.decorator_list)):
            found |= {node.name, *_called(node)}
    return frozenset(f"scripted {name}".strip() for name in found)


@lru_cache(maxsize=64)
def _called_by_modules(text: str) -> frozenset[str]:
    tree = _tree(text)
    modules = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)] if tree is not None else []
    methods = (part for made in modules for part in made.body if isinstance(part, _FUNCTION))
    return frozenset(f"scripted {name}" for part in methods if part.name != "__init__" for name in _called(part))


def _tree(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _is_mark(decorator: ast.expr) -> bool:
    return COMPILES.search(ast.unparse(decorator)) is not None


def _called(node: ast.AST) -> Iterator[str]:
    """Yield the names of functions that a piece of code calls, also as `module.function`; `self.name` is a method."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call):
            name = re.fullmatch(r"(?!self\.)(?:\w+\.)?(\w+)", ast.unparse(each.func))
            if name is not None:
                yield name[1]

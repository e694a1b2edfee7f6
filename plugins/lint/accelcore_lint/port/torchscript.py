"""What TorchScript compiles, or may compile, as the source of a file tells: such code can ask for no device."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from functools import lru_cache

_SCRIPTS = r"script|script_method|script_if_tracing"
_COMPILES = re.compile(rf"\bjit\.({_SCRIPTS}|export)\b")
_COMPILER = "compiler "
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def compiled_in(texts: Collection[str]) -> frozenset[str]:
    """Return what these files of one program compile: `"scripted NAME"`, and `"scripted"` if that may be a module.

    The names are those of functions and classes that are compiled, and of those that they call. If modules are, they
    are also those that modules call outside of their constructors. Comments and strings compile nothing.
    `"compiler NAME"` is another name by which a file calls `torch.jit.script` or what is like it.
    """
    compilers = frozenset(name for text in texts for name in _compilers_in(text))
    found = frozenset(mark for text in texts for mark in _scripted_in(text, compilers))
    found |= {f"{_COMPILER}{name}" for name in compilers}
    return found | {mark for text in texts for mark in _called_by_modules(text)} if "scripted" in found else found


def compiles(decorator: str, marks: Collection[str]) -> bool:
    """Return whether a decorator makes TorchScript compile what it decorates, given the marks of its program."""
    words = {f"{_COMPILER}{word}" for word in re.findall(r"\w+", decorator)}
    return _COMPILES.search(decorator) is not None or not words.isdisjoint(marks)


@lru_cache(maxsize=64)
def _compilers_in(text: str) -> frozenset[str]:
    """Return the names that a file gives to `torch.jit.script`: imports, variables, and functions that call it."""
    if not re.search(rf"\bjit\b[^\n]*\b({_SCRIPTS})\b", text) or (tree := _tree(text)) is None:
        return frozenset()
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch.jit":
            found |= {each.asname or each.name for each in node.names if re.fullmatch(_SCRIPTS, each.name)}
        elif isinstance(node, ast.Assign):
            called = {id(each.func) for each in ast.walk(node.value) if isinstance(each, ast.Call)}
            named = (each for each in ast.walk(node.value) if isinstance(each, ast.Attribute))
            if any(id(each) not in called and _COMPILES.search(ast.unparse(each)) for each in named):
                targets = (re.fullmatch(r"(?:\w+\.)*(\w+)", ast.unparse(target)) for target in node.targets)
                found |= {target[1] for target in targets if target is not None}
        elif isinstance(node, _FUNCTION) and node.args.args:
            passed = rf"\bjit\.script\({node.args.args[0].arg}\b"
            found |= {node.name} if re.search(passed, ast.unparse(node)) else set()
    return frozenset(found)


@lru_cache(maxsize=64)
def _scripted_in(text: str, compilers: frozenset[str]) -> frozenset[str]:
    called = re.compile("|".join([r"(?:\w+\.)*jit\.script", *(rf"(?!self\.)(?:\w+\.)?{name}" for name in compilers)]))
    if not (_COMPILES.search(text) or called.search(text)) or (tree := _tree(text)) is None:
        return frozenset()
    marks = [f"{_COMPILER}{name}" for name in compilers]
    own = {node.name for node in tree.body if isinstance(node, _FUNCTION)}
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and called.fullmatch(ast.unparse(node.func)):
            given = ast.unparse(node.args[0])
            found |= {given.rpartition(".")[2]} if re.fullmatch(r"[\w.]+", given) else set()
            found |= set() if given in own else {""}
        elif isinstance(node, (*_FUNCTION, ast.ClassDef)) and any(
            compiles(ast.unparse(each), marks) for each in node.decorator_list
        ):
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


def _called(node: ast.AST) -> Iterator[str]:
    """Yield the names of functions that a piece of code calls, also as `module.function`; `self.name` is a method."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call):
            name = re.fullmatch(r"(?!self\.)(?:\w+\.)?(\w+)", ast.unparse(each.func))
            if name is not None:
                yield name[1]

"""Classes of torch's modules, and the functions that TorchScript compiles, which can ask for no device."""

from __future__ import annotations

import re

import libcst as cst

from accelcore_lint.port.syntax import text_of
from accelcore_lint.port.torchscript import compiled_in, compiles
from accelcore_lint.port.tree import Tree

_FUNCTION = re.compile(r"((torch\.)?autograd\.)?Function")


def is_module(made: cst.ClassDef) -> bool:
    """Return whether a class is a module of torch, by its bases or by its method `forward`."""
    return any(text_of(base.value).endswith("Module") for base in made.bases) or any(
        isinstance(part, cst.FunctionDef) and part.name.value == "forward" for part in made.body.body
    )


def is_function(made: cst.ClassDef) -> bool:
    """Return whether a class is a `torch.autograd.Function`: TorchScript runs it in Python, by its `apply`."""
    return any(_FUNCTION.fullmatch(text_of(base.value)) for base in made.bases)


def is_scripted(site: cst.CSTNode, tree: Tree) -> bool:
    """Return whether TorchScript compiles the function around a site, or may do so with a module of the project.

    It compiles what its decorators mark, what `torch.jit.script` gets, and all that this calls. That is each method of
    a module but its constructor, and all methods of another class.
    """
    around = [outer for outer in tree.parents(site) if isinstance(outer, (cst.FunctionDef, cst.ClassDef))]
    functions = [outer for outer in around if isinstance(outer, cst.FunctionDef)]
    if not functions:
        return False
    marks = tree.known.uses | compiled_in([tree.code])
    if any(compiles(text_of(made), marks) for each in around for made in each.decorators):
        return True
    holder = next((outer for outer in reversed(around) if isinstance(outer, cst.ClassDef)), None)
    if holder is not None and is_function(holder):
        return False
    if holder is not None and is_module(holder):
        return "scripted" in marks and functions[-1].name.value != "__init__"
    compiled = [name for mark in marks if (name := mark.removeprefix("scripted ")) in tree.defined]
    return around[-1].name.value in tree.reached(compiled)[0]

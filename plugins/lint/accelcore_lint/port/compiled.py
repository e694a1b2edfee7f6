"""Classes of torch's modules, and the functions that TorchScript compiles, which can ask for no device."""

from __future__ import annotations

import re

import libcst as cst

from accelcore_lint.port.syntax import text_of
from accelcore_lint.port.tree import Tree

_FUNCTION = re.compile(r"((torch\.)?autograd\.)?Function")
_SCRIPTED = re.compile(r"\bjit\.(script|script_method|export)\b|\bscript_method\b")


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
    a module but its constructor.
    """
    functions = [outer for outer in tree.parents(site) if isinstance(outer, cst.FunctionDef)]
    if not functions:
        return False
    if any(_SCRIPTED.search(text_of(made)) for each in functions for made in each.decorators):
        return True
    given = [call.args[0].value for call in tree.calls if tree.name(call.func) == "torch.jit.script" and call.args]
    names = {text_of(each) for each in given}
    if functions[-1].name.value in tree.reached([*names & {*tree.functions}])[0]:
        return True
    scripts_modules = "scripted" in tree.known.uses or not names <= {*tree.functions}
    holder = tree.parent(tree.parent(functions[-1]) or functions[-1])
    if not isinstance(holder, cst.ClassDef) or is_function(holder):
        return False
    return scripts_modules and is_module(holder) and functions[-1].name.value != "__init__"

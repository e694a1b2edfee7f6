"""The environment variables by which a script hides devices: each vendor has its own."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from accelcore_lint.port.rule import TODO
from accelcore_lint.port.syntax import code_of, text_of
from accelcore_lint.port.vendors import DEVICES, VISIBLE
from accelcore_lint.port.walk import find

_FIRST, _OTHER = VISIBLE
_BY_RANK = re.compile(rf"(?i)(?:{_FIRST}|{_OTHER})[\"']\] *=[^\n]*(?:rank|localid)")
_VENDOR = re.compile(rf"(?i)(?<![a-z])(?:{'|'.join(DEVICES)})")
_HIDES = re.compile(r"(CUDA|ASCEND_RT)_VISIBLE_DEVICES[\"']\] *=[^=]|setdefault\([\"'](CUDA|ASCEND_RT)_VISIBLE_DEVICES")
_DEFINED = re.compile(r"(?m)^([ \t]*)(def|class)[ \t]+(\w+)")
_IS_LEFT = re.compile(rf"{re.escape(TODO)}.*\n\s*[\w.]*environ\b")


def hides_by_rank(text: str, *, ported: bool = False) -> str:
    """Return why questions for a device stay in a program with a file that hides devices by rank; "" if it hides none.

    `ported`: whether the file is ported. If its port hides the devices of all vendors, there is no reason either.
    """
    lines = [each[0] for each in _BY_RANK.finditer(text)]
    if not lines or (ported and _is_for_all(text, lines)):
        return ""
    return (
        "an environment variable such as CUDA_VISIBLE_DEVICES gives each rank its device, and each vendor reads "
        "another one: make a device current by torch.accelerator.set_device_index(rank) instead"
    )


def _is_for_all(text: str, lines: list[str]) -> bool:
    """Return whether a ported file sets both vendors' variables: it does already, or no word of a line is left."""
    if all(_FIRST in line and _OTHER in line for line in lines):
        return True
    try:
        made = variables_set(cst.parse_module(text))
    except cst.ParserSyntaxError:
        return False
    return bool(made) and not any(_VENDOR.search(text_of(line.value)) for line in made)


def functions_that_hide(text: str) -> Iterator[str]:
    """Yield the functions that set a variable which hides devices; for a constructor, its class."""
    for found in _HIDES.finditer(text):
        begin = text.rfind("\n", 0, found.start()) + 1
        indent = len(text[begin : found.start()]) - len(text[begin : found.start()].lstrip())
        guard = max(text.rfind("\nif __name__", 0, found.start()), 0)  # it ends the function above it
        outer = [made for made in _DEFINED.finditer(text, guard, found.start()) if len(made[1]) < indent]
        for made in reversed(outer):
            if len(made[1]) >= indent:
                continue
            indent = len(made[1])
            if made[3] != "__init__":
                yield made[3]
                break


def variables_set(module: cst.Module) -> list[cst.Assign]:
    """Return the assignments to `os.environ["CUDA_VISIBLE_DEVICES"]` of a file, if it does no more with the variable.

    None if it sets both vendors' variables, reads one, hides all devices, or has a comment of an earlier run.
    """
    code = code_of(module)
    if _FIRST not in code or _OTHER in code or _IS_LEFT.search(code):
        return []
    made = [each for each in find(module, cst.Assign) if _sets(each)]
    helps = {arg.value for arg in find(module, cst.Arg) if arg.keyword is not None and arg.keyword.value == "help"}
    names = [each for each in find(module, cst.SimpleString) if each.evaluated_value == _FIRST and each not in helps]
    return made if len(made) == len(names) else []


def with_both_variables(module: cst.Module) -> cst.Module:
    """Set both vendors' variables where a file sets one: each vendor's devices ignore the other's."""
    lines = variables_set(module)
    return module.visit(_Both(lines)) if lines else module


class _Both(cst.CSTTransformer):
    """Gives each of some lines the variable of the other vendor as a second target."""

    def __init__(self, lines: list[cst.Assign]) -> None:
        super().__init__()
        self._lines = lines

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> cst.Assign:
        if original_node not in self._lines:
            return updated_node
        (first,) = updated_node.targets
        other = first.with_changes(target=cst.ensure_type(first.target, cst.Subscript).deep_replace(*_named(first)))
        return updated_node.with_changes(targets=[first, other])


def _named(target: cst.AssignTarget) -> tuple[cst.SimpleString, cst.SimpleString]:
    """Return the name of the variable in a target, and that of the other one."""
    (name,) = find(target, cst.SimpleString)
    return name, name.with_changes(value=name.value.replace(_FIRST, _OTHER))


def _sets(line: cst.Assign) -> bool:
    target = line.targets[0].target
    if len(line.targets) != 1 or not isinstance(target, cst.Subscript):
        return False
    is_variable = text_of(target.value) in ("os.environ", "environ") and _FIRST in text_of(target)
    return is_variable and text_of(line.value).strip("'\"") not in ("", "-1")

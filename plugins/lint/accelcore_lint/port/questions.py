"""Questions of a script for its device: what each decides, by which name, and where that name is asked."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import cast

import libcst as cst

from accelcore_lint.port.facts import Facts
from accelcore_lint.port.guards import Guard, Test, has_blocks, is_truth, lacks_answer, last_of, passes_on
from accelcore_lint.port.project import OTHERS
from accelcore_lint.port.rule import Note
from accelcore_lint.port.splits import is_split
from accelcore_lint.port.syntax import key_of, text_of
from accelcore_lint.port.uses import STOPS
from accelcore_lint.port.walk import find

PARTS = (cst.BooleanOperation, cst.UnaryOperation, cst.Comparison, cst.ComparisonTarget)
"""Expressions of which a condition may be a part."""

_CPU = re.compile(r"(?:torch\.device\()?[\"']cpu[\"']\)?")
_FALLBACK = re.compile(rf"([\w.]+) *= *{_CPU.pattern}(?:[ \t]*#.*)?(?:\s+[\w.]+ *= *(?:False|None|0))*")
"""A line that chooses the CPU after all, and others that turn something off for it."""


def guard_of(node: cst.CSTNode, facts: Facts) -> Guard | None:
    """Return the `if`, the choice, or the test of whose condition a node is a part."""
    inner = node
    for outer in facts.parents(node):
        if isinstance(outer, (cst.If, cst.IfExp)) and not is_truth(outer):
            return outer if inner is outer.test else None
        if isinstance(outer, cst.Decorator):
            return cast("Test", facts.parent(outer))
        if isinstance(outer, (cst.For, cst.CompFor)) and inner is outer.iter:
            loop = outer if isinstance(outer, cst.For) else facts.parent(outer)
            return loop if isinstance(loop, (cst.For, cst.BaseComp)) else None
        is_part = isinstance(outer, (*PARTS, cst.Arg, cst.IfExp)) or passes_on(outer)
        if not is_part:
            return None
        inner = outer
    return None


def name_of(node: cst.CSTNode, facts: Facts) -> str:
    """Return the name to which a condition is assigned, or of the option or default that it is; "" if none."""
    for outer in facts.parents(node):
        if isinstance(outer, cst.Param):
            return outer.name.value
        if isinstance(outer, cst.Assign):
            return text_of(outer.targets[0].target) if len(outer.targets) == 1 else ""
        options = [name for name, call in facts.options.items() if call is outer]
        if option := options[0] if options else key_of(outer):
            found = re.search(rf"\b\w+\.{re.escape(option)}\b(?! *[(.])", facts.code)
            return found[0] if found else ""
        is_part = isinstance(outer, (cst.BaseExpression, cst.ComparisonTarget)) and not isinstance(outer, cst.Call)
        if not (is_part or isinstance(outer, cst.Arg) or passes_on(outer)):
            return ""
    return ""


def flag_of(node: cst.CSTNode, facts: Facts) -> str:
    """Return the last part of the name that gets an answer, or its option, key or function; "" if there is none."""
    around = list(facts.parents(node))
    holder = next((each for each in around if isinstance(each, (cst.Assign, cst.Return, cst.BaseStatement))), None)
    flag = ""
    if isinstance(holder, cst.Assign):
        flag = re.findall(r"\w+", text_of(holder.targets[0].target))[-1]
    elif isinstance(holder, cst.Return):
        flag = next(each.name.value for each in around if isinstance(each, cst.FunctionDef))
    found = [name for name, call in facts.options.items() if call in around] + list(filter(None, map(key_of, around)))
    found += [each.keyword.value for each in around if isinstance(each, cst.Arg) and each.keyword]
    return next(iter(found), flag)


def passed_as(name: str, facts: Facts) -> set[str]:
    """Return the parameters by which the file's functions get a name, as in `run(model, on_gpu=use_cuda)`."""
    own = (call for call in facts.calls if facts.name(call.func) is None)
    args = (arg for call in own for arg in call.args if text_of(arg.value) == name)
    return {arg.keyword.value for arg in args if arg.keyword is not None}


def is_only_asked(name: str, node: cst.CSTNode, facts: Facts) -> bool:
    """Return whether a name of a function is assigned once, and then only stands in conditions."""
    function = facts.function_of(node)
    if not name.isidentifier() or function is None:
        return False
    found = [use for use in find(function, cst.Name) if use.value == name]
    uses = [use for use in found if getattr(facts.parent(use), "attr", None) is not use]
    asked = sum(any(_is_test(outer, facts) for outer in (use, *facts.parents(use))) for use in uses)
    return 0 < asked == len(uses) - 1


def _is_test(node: cst.CSTNode, facts: Facts) -> bool:
    holder = facts.parent(node)
    return isinstance(holder, (cst.If, cst.IfExp)) and holder.test is node


def asserts(node: cst.CSTNode, facts: Facts) -> bool:
    """Return whether a program stops if the answer to a question is no."""
    last = last_of(guard_of(node, facts))
    stops = last is not None and STOPS.search(text_of(last)) is not None
    return stops or any(isinstance(outer, cst.Assert) for outer in facts.parents(node))


def divides(guard: Guard | None, node: cst.CSTNode, facts: Facts) -> bool:
    """Return whether the answer to a question that stays decides where something is, or what a function returns."""
    return is_split(guard) or lacks_answer(guard, facts.function_of(node), facts.calls)


def members_in(node: cst.CSTNode, facts: Facts) -> set[str]:
    """Return the attributes, as `self.peak`, that the method around a node uses."""
    method = next(each for each in facts.parents(node) if isinstance(each, (cst.FunctionDef, cst.ClassDef)))
    return set(map(text_of, find(method, cst.Attribute)))


def corrects(guard: cst.If, facts: Facts, left: Iterable[Note]) -> bool:
    """Return whether an `if` only replaces a device by the CPU, and the device may stay the vendor's."""
    made = _FALLBACK.fullmatch(cst.Module([]).code_for_node(guard.body).strip())
    if made is None or guard.orelse is not None:
        return False
    values = [value for value in facts.assigned.get(made[1], []) if not _CPU.fullmatch(text_of(value))]
    is_option = made[1].split(".")[-1] in facts.options
    is_left = any(note.rule in ("device string", "unknown name") for note in left)
    return is_left or not (values or is_option)


def precedes_other(guard: cst.If, facts: Facts, rewrites: Iterable[cst.CSTNode]) -> bool:
    """Return whether another accelerator has the next branch, with more than a choice, or this one is left.

    torch's current device may be that accelerator, which would take this branch.
    """
    other = guard.orelse
    if not isinstance(other, cst.If) or OTHERS.search(text_of(other.test)) is None:
        return False
    return has_blocks(other.body) or not any(guard.body in facts.parents(node) for node in rewrites)

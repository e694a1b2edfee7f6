"""`x.cuda()` and `x.npu()`: moves of tensors and modules."""

from __future__ import annotations

import re
from typing import cast

import libcst as cst

from accelcore_lint.port.facts import Facts
from accelcore_lint.port.model import Example, Left, Level, Rewrite, Rule
from accelcore_lint.port.rules.device_strings import device_source, is_device_name
from accelcore_lint.port.tree import arguments, text_of
from accelcore_lint.port.vendors import DEVICES

__all__ = ["MOVES"]


_STORAGE = re.compile(r"[sS]torage\([^()]*\)$")
_DEVICE_OF = re.compile(r"(\w+(?:\.\w+)*)\.get_device\(\)")


def _decide(node: cst.Call, facts: Facts) -> Rewrite | Left | None:
    func = node.func
    if isinstance(func, cst.Attribute) and func.attr.value == "to" and node.args:
        return _decide_to(node, facts)
    if not isinstance(func, cst.Attribute) or func.attr.value not in DEVICES or facts.name(func) is not None:
        return None
    method = func.attr.value
    if method in facts.defined_methods:
        return Left(f"this file defines a method {method}, which may be the one that is called")
    if text_of(func.value) == "super()":
        return Left(f"the inherited {method}(): call to(device) where this method is called")
    if _STORAGE.search(text_of(func.value)):
        return Left("a storage, which moves by to(device=...): a tensor's memory is no part of a training script")
    given = arguments(node, "device", "non_blocking")
    if given is None:
        return Left(f"arguments of {method}() that are not known")
    index = given.pop("device").value if "device" in given else None
    if index is not None and isinstance(index, cst.Name) and is_device_name(index.value) and not facts.is_whole(index):
        source: str | Left = text_of(index)
    elif index is not None and (tensor := _DEVICE_OF.fullmatch(text_of(index))):
        source = f"{tensor[1]}.device"
    else:
        source = device_source(facts, node, index)
    if isinstance(source, Left):
        return source
    device = cst.parse_expression(source)
    keeps = [position for position, arg in enumerate(node.args) if arg in given.values()]

    def build(updated: cst.Call) -> cst.Call:
        receiver = cast("cst.Attribute", updated.func)
        kept = [updated.args[position] for position in keeps]
        comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        first = cst.Arg(device, comma=comma) if kept else cst.Arg(device)
        return updated.with_changes(func=receiver.with_changes(attr=cst.Name("to")), args=[first, *kept])

    return Rewrite(build, claims=[func.attr, *(arg for arg in node.args if arg not in given.values())])


def _decide_to(node: cst.Call, facts: Facts) -> Rewrite | None:
    """Replace `x.to(local_rank)`, which needs an accelerator."""
    first = node.args[0]
    if first.keyword is not None or first.star or not facts.is_local_rank(first.value):
        return None
    source = device_source(facts, node, first.value)
    if isinstance(source, Left):
        return None
    device = cst.parse_expression(source)
    return Rewrite(
        lambda updated: updated.with_changes(args=[updated.args[0].with_changes(value=device), *updated.args[1:]]),
        [first],
    )


MOVES = Rule(
    "move",
    "`.cuda()` and `.npu()`",
    (cst.Call,),
    _decide,
    (
        Example(Level.TORCH, "x = x.cuda(non_blocking=True)", "x = x.to(device, non_blocking=True)"),
        Example(Level.ROLES, "model = Net().cuda()", "model = Net().to(accel.device)"),
        Example(Level.ROLES, "model.cuda(local_rank)", "model.to(accel.device)"),
        Example(Level.ROLES, "window = window.cuda(x.get_device())", "window = window.to(x.device)"),
        Example(Level.ROLES, "x = x.to(local_rank)", "x = x.to(accel.device)"),
    ),
)

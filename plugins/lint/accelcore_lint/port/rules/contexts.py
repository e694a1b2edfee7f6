"""`with torch.cuda.device(index):` makes a device current, as `torch.accelerator.device_index` does for all of them."""

from __future__ import annotations

import re

import libcst as cst

from accelcore_lint.port.facts import Facts
from accelcore_lint.port.model import Example, Level, Rewrite, Rule
from accelcore_lint.port.rules.device_strings import index_source, whole
from accelcore_lint.port.rules.statements import is_vendors
from accelcore_lint.port.syntax import text_of

_TENSOR = re.compile(r"\w+(\.\w+)*")


def _decide(node: cst.Call, facts: Facts) -> Rewrite | None:
    tensor = text_of(node.args[0].value) if len(node.args) == 1 else ""
    if facts.name(node.func) == "torch.cuda.device_of" and _TENSOR.fullmatch(tensor):
        source = f"{tensor}.device.index"  # None on the CPU, which makes nothing current
        return whole(node, f"{facts.torch}.accelerator.device_index({source})", facts.needs_torch)
    if not facts.makes_current(node):
        return None
    index = node.args[0].value
    source, available = index_source(index), f"{facts.torch}.accelerator.is_available()"
    if is_vendors(index):
        return None
    if facts.level is not Level.TORCH and not facts.place.by_hand and facts.is_own(index):
        device = facts.place.device(node)
        source, available = f"{device}.index", f'{device}.type != "cpu"'
    elif not facts.counts(index) and not _is_checked(node, source, facts):
        available += f" and {source} >= 0"  # torch.cuda.device(-1) does nothing
    if " and " in available or not facts.guards(node):
        source = f"{source} if {available} else None"
    return whole(node, f"{facts.torch}.accelerator.device_index({source})", facts.needs_torch)


def _is_checked(node: cst.CSTNode, index: str, facts: Facts) -> bool:
    """Return whether a line only runs if an index is not negative."""
    inner = node
    for outer in facts.parents(node):
        if (
            isinstance(outer, cst.If)
            and inner is outer.body
            and text_of(outer.test) in (f"{index} >= 0", f"{index} != -1")
        ):
            return True
        inner = outer
    return False


CONTEXTS = Rule(
    "context",
    "blocks in which a device is current, by a whole number",
    (cst.Call,),
    _decide,
    (
        Example(
            Level.ROLES,
            "for i in range(torch.cuda.device_count()):\n    with torch.cuda.device(i):\n        f(x)",
            "for i in range(torch.accelerator.device_count()):\n"
            "    with torch.accelerator.device_index(i if torch.accelerator.is_available() else None):\n"
            "        f(x)",
        ),
    ),
)

"""Calls that stand alone on a line: waiting for the device, choosing it, emptying its cache."""

from __future__ import annotations

import re

import libcst as cst

from accelcore_lint.port.device_names import index_of, index_source
from accelcore_lint.port.facts import Facts
from accelcore_lint.port.removed import removed
from accelcore_lint.port.rule import Example, Left, Level, Rewrite, Rule
from accelcore_lint.port.rules.device_strings import whole
from accelcore_lint.port.syntax import argument, text_of
from accelcore_lint.port.vendors import DEVICES

_MODULES = {"torch.cuda", "torch.cuda.memory", "torch.cuda.random"}
_RESETS = ("reset_peak_memory_stats", "reset_accumulated_memory_stats", "reset_max_memory_allocated")
_VENDORS = re.compile(rf"torch\.({'|'.join(DEVICES)})\b|[\"']({'|'.join(DEVICES)})(:|[\"'])")
_ONE_LINE = {"synchronize": "accelerator", "empty_cache": "get_device_module()"}
"""Where torch has the functions that need no argument where there is a device, for all accelerators."""

_NUMBER = re.compile(
    r"(?i).*(?:rank|gpu|npu|card|id|idx|index|num|number|\b[a-z]|get_device\(|current_device\()s?[])\d[]*"
)
"""Names of numbers of devices, also of one of a list."""

_DEVICE = re.compile(rf"\btorch\.device\(|[\"']({'|'.join(DEVICES)})\b")
_NO_INDEX = "set_device of a device that may have no index: torch.accelerator.set_device_index needs a number"

_OPTIONAL = (*_RESETS, "ipc_collect")
"""Functions that not every device's module has. Without one there is nothing to do."""

_CALLS = ("synchronize", "set_device", "empty_cache", *_OPTIONAL)


def called(node: cst.SimpleStatementLine | cst.SimpleStatementSuite, facts: Facts) -> tuple[str, cst.Call] | None:
    """Return the function of a vendor's module that a line calls, and the call; None for anything else."""
    if len(node.body) != 1 or not isinstance(node.body[0], cst.Expr) or not isinstance(node.body[0].value, cst.Call):
        return None
    call = node.body[0].value
    if _waits_for_stream(call, facts):
        return "synchronize", call
    name = facts.name(call.func) or ""
    module, _, function = name.rpartition(".")
    return (function, call) if module in _MODULES else None


def _waits_for_stream(call: cst.Call, facts: Facts) -> bool:
    """Return whether a call is `torch.npu.current_stream().synchronize()`."""
    func = call.func
    if not isinstance(func, cst.Attribute) or func.attr.value != "synchronize" or call.args:
        return False
    of = func.value
    return isinstance(of, cst.Call) and not of.args and facts.name(of.func) == "torch.cuda.current_stream"


def _guarded(facts: Facts, node: cst.SimpleStatementLine, source: str, test: str = "") -> Rewrite:
    """Return the decision to run a line only if a test is true: by default, if there is an accelerator."""
    line = cst.ensure_type(cst.parse_statement(source), cst.SimpleStatementLine)

    def build(updated: cst.SimpleStatementLine) -> cst.BaseStatement:
        inner = line.with_changes(trailing_whitespace=updated.trailing_whitespace)
        if facts.guards(node) and not test:
            return inner.with_changes(leading_lines=updated.leading_lines)
        asked = cst.parse_expression(test or f"{facts.torch}.accelerator.is_available()")
        outer = facts.parent(node)
        indent = outer.indent if isinstance(outer, cst.IndentedBlock) else None
        return cst.If(asked, cst.IndentedBlock([inner], indent=indent), leading_lines=updated.leading_lines)

    return Rewrite(build, node.body, facts.needs_torch)


def _decide(node: cst.SimpleStatementLine, facts: Facts) -> Rewrite | Left | None:
    found = called(node, facts)
    if found is None or found[0] not in _CALLS:
        return None
    name, call = found
    module = f"{facts.torch}.accelerator"
    device = argument(call, "device", 0)
    foreign = device is not None and index_of(device) == (False, None) and _is_vendors(device)
    if len(call.args) > 1 or foreign or isinstance(device, cst.NamedExpr):  # a name is set with and without a device
        return Left(f"arguments of {name} that are not known")
    named, index = index_of(device) if device is not None else (True, None)
    own = named or device is None or facts.is_local_rank(device) or text_of(device) == "0"
    if facts.level is not Level.TORCH:
        if name == "synchronize" and own and facts.place.can_choose(node):
            return None  # an expression, wherever it stands
        if name == "set_device" and device is not None and _is_known(facts, node, device):
            if _may_lack_index(facts, call, device):
                return Left(_NO_INDEX)
            # What follows takes the current device.
            number = index_source(index or device)
            if index is not None and not (facts.is_whole(index) or facts.is_local_rank(index)):
                number = f"int({number})"  # in the name of a device it may also have been a text
            return _guarded(facts, node, f"{module}.set_device_index({number})")
        if name == "set_device":
            return _set_device(facts, node, device)
    if name == "set_device" and device is not None and _may_lack_index(facts, call, device):
        return Left(_NO_INDEX)
    device = index if named else device
    new = {"set_device": "set_device_index", "reset_max_memory_allocated": "reset_peak_memory_stats"}.get(name, name)
    given = "" if device is None or new == "empty_cache" else index_source(device)
    if name not in (*_OPTIONAL, "empty_cache"):
        return _guarded(facts, node, f"{module}.{new}({given})")
    facts.place.check_question(node)
    of = f"{facts.torch}.get_device_module()"  # torch.accelerator has these from torch 2.9, and not for MPS
    return _guarded(facts, node, f"{of}.{new}({given})", f'hasattr({of}, "{new}")' if name in _OPTIONAL else "")


def _is_vendors(device: cst.BaseExpression) -> bool:
    """Return whether an expression holds a vendor's word that would stay in it."""
    return _VENDORS.search(index_source(device)) is not None


def _is_known(facts: Facts, node: cst.CSTNode, device: cst.BaseExpression) -> bool:
    """Return whether a device is made current by a number that lines elsewhere, which take the current one, need."""
    if facts.is_library and _is_chosen(facts, device):  # it is current
        return False
    chosen = facts.is_local_rank(device) or (facts.place.by_hand and index_of(device) != (True, None))
    return facts.place.is_apart(node) and chosen


def _may_lack_index(facts: Facts, call: cst.Call, device: cst.BaseExpression) -> bool:
    """Return whether a device may have no index: torch_npu takes that, and level TORCH writes a device without one."""
    named, index = index_of(device)
    if named or facts.is_whole(device) or facts.is_local_rank(device):
        return named and index is None
    if _has_index(facts, call, device):
        return False
    if facts.level is Level.TORCH and _is_chosen(facts, device):
        return True
    if "cuda" in text_of(call.func) or "npu" not in facts.code:
        return False
    values = [value for value in facts.values(device) if index_of(value)[1] is None]
    is_named = bool(facts.values(device)) and not values and not facts.is_given(text_of(device), device)
    is_number = is_named or _NUMBER.fullmatch(text_of(device)) is not None
    return not is_number or any(_DEVICE.search(text_of(value)) for value in values)


def _has_index(facts: Facts, call: cst.Call, device: cst.BaseExpression) -> bool:
    """Return whether a call is under a condition such as `if device.startswith("npu:"):`."""
    asked = re.compile(rf"{re.escape(text_of(device))}\.startswith\([\"'](?:{'|'.join(DEVICES)}):[\"']\)")
    inner: cst.CSTNode = call
    for outer in facts.parents(call):
        if isinstance(outer, cst.FunctionDef):
            break
        if isinstance(outer, cst.If) and inner is outer.body and asked.fullmatch(text_of(outer.test)):
            return True
        inner = outer
    return False


def _decide_wait(node: cst.Call, facts: Facts) -> Rewrite | Left | None:
    """Wait through the backend, also in the middle of a line; report other calls there."""
    module, _, function = (facts.name(node.func) or "").rpartition(".")
    if _waits_for_stream(node, facts):
        function = "synchronize"
    elif module not in _MODULES or function not in _CALLS:
        return None
    device = argument(node, "device", 0)
    own = device is None or facts.is_local_rank(device) or text_of(device) == "0"
    if facts.level is not Level.TORCH and function == "synchronize" and own and len(node.args) < 2:
        return whole(node, f"{facts.place.backend(node)}.runtime.synchronize()")
    if function in _ONE_LINE and not node.args and facts.guards(node) and isinstance(facts.parent(node), cst.Expr):
        facts.place.check_question(node)
        return whole(node, f"{facts.torch}.{_ONE_LINE[function]}.{function}()", facts.needs_torch)
    is_one = len(node.args) == 1 and isinstance(device, cst.Name) and isinstance(facts.parent(node), cst.Lambda)
    if function == "synchronize" and is_one and facts.guards(node):
        return whole(node, f"{facts.torch}.accelerator.synchronize({text_of(device)})", facts.needs_torch)
    return Left(f"{function} in the middle of a line: give it a line of its own", node.children)


def _set_device(facts: Facts, node: cst.SimpleStatementLine, device: cst.BaseExpression | None) -> Rewrite | Left:
    """Remove the choice of the device, which `accelcore.select` has made; or report one that it does not make."""
    if device is not None and (facts.is_local_rank(device) or text_of(device) == "0" or _is_chosen(facts, device)):
        facts.place.device(node)
        return Rewrite(removed, node.body)
    return Left("set_device: ACCEL_DEVICE or the launcher's local rank chooses the device; remove this if they do")


def _is_chosen(facts: Facts, device: cst.BaseExpression) -> bool:
    """Return whether an expression is a `torch.device`, or the name of one, that the backend has."""
    made = facts.indexes_of(device)
    return made != [device] and all(index is None or facts.is_own(index) for index in made)


ALONE = Rule(
    "device call",
    "lines that wait for the device, choose it, or free its memory",
    (cst.SimpleStatementLine,),
    _decide,
    (
        Example(
            Level.TORCH,
            "torch.cuda.synchronize()",
            "if torch.accelerator.is_available():\n    torch.accelerator.synchronize()",
        ),
        Example(
            Level.TORCH,
            "torch.cuda.set_device(rank)",
            "if torch.accelerator.is_available():\n    torch.accelerator.set_device_index(rank)",
        ),
        Example(
            Level.ROLES,
            "torch.cuda.ipc_collect()",
            'if hasattr(torch.get_device_module(), "ipc_collect"):\n    torch.get_device_module().ipc_collect()',
        ),
        Example(Level.ROLES, "torch.cuda.set_device(local_rank)\nprint(local_rank)", "print(local_rank)"),
        Example(Level.ROLES, "torch.npu.current_stream().synchronize()", "accel.runtime.synchronize()"),
    ),
)

WAIT = Rule(
    "wait",
    "`synchronize`, and `empty_cache()` on the line of a question for a device",
    (cst.Call,),
    _decide_wait,
    (
        Example(Level.ROLES, "torch.cuda.synchronize()", "accel.runtime.synchronize()"),
        Example(
            Level.ROLES,
            "if torch.cuda.is_available(): torch.cuda.empty_cache()",
            'if accel.device.type != "cpu": torch.get_device_module().empty_cache()',
        ),
        Example(
            Level.ROLES,
            'if device.type == "cuda":\n    wait = lambda: torch.cuda.synchronize(device=device)',
            'if device.type != "cpu":\n    wait = lambda: torch.accelerator.synchronize(device)',
        ),
    ),
)

"""The words of vendors: devices, modules of torch, process groups; and what asks for them."""

from __future__ import annotations

import ast
import re

from accelcore_lint.script import Script, last_name, text_of

DEVICES = ("cuda", "npu", "xpu", "hpu", "mlu", "musa", "mps", "gcu", "sdaa")
"""Types of torch devices with a vendor."""

GROUPS = ("nccl", "hccl", "xccl", "ccl", "cncl", "mccl", "eccl")
"""Process groups with a vendor."""

_DEVICE = re.compile(rf"(?:{'|'.join(DEVICES)})(?::\d*)?", re.ASCII)
_RUNTIME = re.compile(rf"(?:torch|torch_npu|torch_musa|torch_mlu)\.({'|'.join(DEVICES)})\.(.+)", re.ASCII)
_PREDICATES = {f"is_{device}" for device in DEVICES}
_DEPTH = 4  # names that stand for a predicate, followed through assignments


def is_device_text(node: ast.AST | None) -> bool:
    """Return whether an expression is `"cuda"`, `"npu:0"` or `f"cuda:{rank}"`."""
    return bool(_DEVICE.fullmatch(text_of(node)))


def runtime_call(name: str) -> tuple[str, str] | None:
    """Split the dotted name of a vendor's runtime, `torch.cuda.synchronize`, into device and function."""
    found = _RUNTIME.fullmatch(name)
    return (found[1], found[2]) if found else None


def asks_for_vendor(script: Script, test: ast.AST, depth: int = _DEPTH) -> bool | None:
    """Return True if a test is true for vendors' devices only, False for the reverse, None for other tests."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = asks_for_vendor(script, test.operand, depth)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        parts = [asks_for_vendor(script, part, depth) for part in test.values]
        if isinstance(test.op, ast.And):
            return True if True in parts else None
        return True if set(parts) == {True} else None
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _compares(script, test)
    if isinstance(test, ast.Call):
        runtime = runtime_call(script.names.resolve(test.func))
        starts = last_name(test.func) == "startswith" and bool(test.args) and is_device_text(test.args[0])
        called = last_name(test.func) in _PREDICATES and isinstance(test.func, ast.Attribute)
        return True if starts or called or (runtime is not None and runtime[1] == "is_available") else None
    if isinstance(test, ast.Attribute) and test.attr in _PREDICATES:
        return True
    value = script.names.value(test) if depth else None
    return None if value is None else asks_for_vendor(script, value, depth - 1)


def _compares(script: Script, test: ast.Compare) -> bool | None:
    left, operation, right = test.left, test.ops[0], test.comparators[0]
    if isinstance(operation, ast.Eq | ast.NotEq | ast.Is | ast.IsNot):
        same = is_device_text(left) or is_device_text(right)
        return isinstance(operation, ast.Eq | ast.Is) if same else None
    if isinstance(operation, ast.In | ast.NotIn):
        several = isinstance(right, ast.Tuple | ast.List | ast.Set) and bool(right.elts)
        among = several and all(is_device_text(item) for item in right.elts)  # type: ignore[attr-defined]
        return isinstance(operation, ast.In) if is_device_text(left) or among else None
    if isinstance(operation, ast.Gt | ast.GtE) and isinstance(left, ast.Call):
        runtime = runtime_call(script.names.resolve(left.func))
        least = right.value if isinstance(right, ast.Constant) else None
        some = least == (0 if isinstance(operation, ast.Gt) else 1)
        return True if runtime is not None and runtime[1] == "device_count" and some else None
    return None

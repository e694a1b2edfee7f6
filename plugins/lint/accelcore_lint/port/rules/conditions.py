"""Conditions on a vendor's device: `if device.type == "cuda":`, `if x.is_cuda:`."""

from __future__ import annotations

import re
from typing import cast

import libcst as cst

from accelcore_lint.port.device_names import index_of, is_device_name
from accelcore_lint.port.facts import Facts
from accelcore_lint.port.rule import Example, Left, Level, Rewrite, Rule
from accelcore_lint.port.rules.device_strings import AVAILABLE, whole
from accelcore_lint.port.rules.typed_tensors import DTYPES, OF_DEVICE
from accelcore_lint.port.syntax import text_of
from accelcore_lint.port.vendors import DEVICES, FLAGS, SETTINGS, type_text

_AS_CPU = "a condition on one vendor's device: other accelerators answer it as the CPU does"
TYPE_QUESTION = "a question about one vendor's type of tensor: x.device.type and x.dtype answer it on all devices"
_UNSURE = "a comparison with a vendor's name, which may be that of something else than a device"
_EVERYWHERE = re.compile(r"pin_memory|non_blocking|synchronize\(|empty_cache\(|\.(cuda|npu)\(")
"""Lines that MPS has as other accelerators do."""

_ASKS = re.compile(r"get_device|capability|memory_|Stream|Event|Graph|autocast\(")

_OPTIONS = re.compile(r"pin_memory|non_blocking|(\w+_)?fused")
"""Options that torch has for every accelerator."""
_NAMES = re.compile(rf"([\"'])({'|'.join(DEVICES)}|cpu|mps|xpu)\1( if [^\"']* else ([\"'])(cpu|mps|xpu)\4)?")
"""A choice between names of devices without an index."""
_VENDOR = re.compile(rf"\b({'|'.join(DEVICES)})\b")
_VENDORS = re.compile(r"(?i)cuda|apex|npu|triton|kernel|extension|fused|\bext\b")

_ASKED = re.compile(r"([\w.]+?)\.(?:is_cuda|is_npu|device\.type == .*)$")
_GRAPH = re.compile(r"(?i)(\w+\.)*\w*(data|batch|graph|sample)")
_TO_HOST = re.compile(r"([\w.]+) *= *\1(\.detach\(\)|\.data)?\.cpu\(\)$")
_MOVED = re.compile(r"\.cpu\(|\.to\(|device *=")

_OF_DEVICE = re.compile(r"^str\(|\)$|\.type$")
_ABOUT = re.compile(r"(?i)dev|\.type\b")
_TYPE = re.compile(r".*(\.type|device_type|device)")
_CPU = ("'cpu'", '"cpu"')


def _decide(node: cst.Comparison | cst.Attribute, facts: Facts) -> Rewrite | Left | None:
    """Ask the condition of every accelerator, unless the script also runs on one that does not have what it guards."""
    decision = _decide_flag(node, facts) if isinstance(node, cst.Attribute) else _decide_comparison(node, facts)
    if decision is not None and _has_rival(node, facts):
        return _left(node)
    waits = isinstance(decision, Left) and decision.retry is not None
    if isinstance(decision, Left) and _needs_host(node, facts):
        return decision.retry or decision
    return _left(node) if waits and facts.names_others and _may_fail(node, facts) else decision


def _has_rival(node: cst.CSTNode, facts: Facts) -> bool:
    """Return whether another branch of an `if` does something else for another vendor: both would ask the same."""
    around = [each for each in facts.parents(node) if not isinstance(each, cst.BooleanOperation)][:2]
    for first, other in ((around[0], getattr(around[0], "orelse", None)), (around[-1], around[0])):
        if isinstance(first, cst.If) and isinstance(other, cst.If) and first.orelse is other:
            tests, bodies = (
                [_VENDOR.sub("", text_of(each)) for each in pair]
                for pair in ((first.test, other.test), (first.body, other.body))
            )
            if text_of(first.test) not in text_of(other.test) and tests[0] in tests[1] and bodies[0] != bodies[1]:
                return True
    return False


def _may_fail(node: cst.CSTNode, facts: Facts) -> bool:
    """Return whether a condition would also be true on another accelerator, which may lack what it guards.

    accelcore selects none of those, but torch's current device may be one.
    """
    guard = facts.parent(node)
    while isinstance(guard, (cst.BooleanOperation, cst.UnaryOperation)):
        guard = facts.parent(guard)
    if not isinstance(guard, (cst.If, cst.IfExp)) or not (facts.level is Level.TORCH or facts.place.is_apart(node)):
        return False
    if isinstance(guard, cst.IfExp):
        return _ASKS.search(text_of(guard.body)) is not None
    block = guard.body.body if isinstance(guard.body, cst.IndentedBlock) else (guard.body,)
    return not all(_EVERYWHERE.search(text_of(line)) for line in block)


def _decide_comparison(node: cst.Comparison, facts: Facts) -> Rewrite | Left | None:
    if len(node.comparisons) != 1 or _asks_in_vain(node, facts):
        return _left(node) if _mentions(node, facts) else None
    target = node.comparisons[0]
    left, right = node.left, target.comparator
    if _is_vendors_device(left, facts) or _is_vendors_device(right, facts):
        return _decide_device(node, left, right, facts)
    if (kind := _kind_of(left, right)) and isinstance(target.operator, cst.Equal):
        return _decide_kind(node, kind, facts)
    if isinstance(target.operator, (cst.Equal, cst.NotEqual)) and _is_vendor(right) and _TYPE.fullmatch(text_of(left)):
        is_text = isinstance(left, cst.Attribute) and left.attr.value == "type"
        is_text = is_text or is_device_name(text_of(left))
        operator = "!=" if isinstance(target.operator, cst.Equal) else "=="
        rewrite = whole(node, f'{text_of(left)} {operator} "cpu"')
        if facts.names_others or not _is_type(left, facts):  # which may be "mps", or "cuda:1", another device
            test = f'{text_of(left)} == {facts.place.kind(node)} != "cpu"'
            rewrite = whole(node, test if operator == "!=" else f"not ({test})")
        if not (isinstance(left, cst.Attribute) and left.attr.value == "type") and _falls_back(node, facts):
            operator = "==" if operator == "!=" else "!="
            rewrite = whole(node, f"{text_of(left)} {operator} {facts.place.kind(node)}")
        if is_text and _is_of_option(node, facts):
            return rewrite
        return Left(_AS_CPU, node.children, retry=rewrite if is_text else None)
    if isinstance(target.operator, cst.In) and _is_vendor(left) and is_device_name(_OF_DEVICE.sub("", text_of(right))):
        test = f'"cpu" != {facts.place.kind(node)} in' if facts.names_others else '"cpu" not in'
        return Left(_AS_CPU, node.children, retry=whole(node, f"{test} {text_of(right)}"))
    return _left(node) if _mentions(node, facts) else None


def _needs_host(node: cst.Comparison | cst.Attribute, facts: Facts) -> bool:
    """Return whether an `if` only moves to the CPU, or otherwise takes a tensor's memory as an array.

    That raises an error on all devices. The tensor is the one whose device is asked, or torch has made it of that one.
    """
    guard, asked = facts.parent(node), _ASKED.match(text_of(node))
    if isinstance(guard, cst.If) and guard.test is node and guard.orelse is None:
        lines = guard.body.body if isinstance(guard.body, cst.IndentedBlock) else ()
        return bool(lines) and all(_TO_HOST.match(text_of(line)) for line in lines)
    other = guard.orelse if isinstance(guard, cst.If) and guard.test is node else None
    if asked is None or not isinstance(other, cst.Else) or not isinstance(other.body, cst.IndentedBlock):
        return False
    function, names = facts.function_of(node), {asked[1]}
    uses = re.compile(rf"(?<![\w.]){re.escape(asked[1])}\b")
    for name, all_ in facts.assigned.items():
        values = [value for value in all_ if facts.function_of(value) is function]
        made = values[0] if len(values) == 1 else None
        is_made = isinstance(made, cst.Call) and (facts.name(made.func) or "").startswith("torch.")
        if made is not None and is_made and uses.search(text_of(made)) and not _MOVED.search(text_of(made)):
            names.add(name)
    owner = "|".join(map(re.escape, names))
    array = re.compile(rf"([\w.]+ *= *)?({owner})(\.detach\(\)|\.data)*\.numpy\(\)(\.tofile\(\w+\))?$")
    for line in map(text_of, other.body.body):
        if array.match(line):
            return True
        if re.search(rf"(?m)(?<![\w.])({owner}) *=(?!=)", line):
            break
    return False


def _asks_in_vain(node: cst.Comparison, facts: Facts) -> bool:
    """Return whether a condition is also that there is no such device: it compares what a caller has written."""
    test = facts.parent(node)
    other = (test.right if test.left is node else test.left) if isinstance(test, cst.BooleanOperation) else node
    return isinstance(other, cst.UnaryOperation) and "cuda.is_available" in text_of(other)


def _kind_of(left: cst.BaseExpression, right: cst.BaseExpression) -> str:
    """Return the dtype of `x.type() == "torch.cuda.HalfTensor"`; "" for any other comparison."""
    asks = isinstance(left, cst.Call) and not left.args and isinstance(left.func, cst.Attribute)
    text = str(right.evaluated_value) if isinstance(right, cst.SimpleString) else ""
    is_type = asks and text_of(left).endswith(".type()") and type_text(text)
    return DTYPES.get(text.rpartition(".")[2], "") if is_type else ""


def _decide_kind(node: cst.Comparison, kind: str, facts: Facts) -> Rewrite | Left:
    """Ask for the dtype on any accelerator, if what the condition guards is about numbers."""
    guard = facts.parent(node)
    body = guard.body if isinstance(guard, (cst.If, cst.IfExp)) and guard.test is node else None
    rewrite = _of_kind(node, text_of(node.left).removesuffix(".type()"), kind, facts)
    is_numbers = body is not None and not _VENDORS.search(text_of(body))
    return rewrite if is_numbers else Left(_AS_CPU, node.children, retry=rewrite)


def _of_kind(node: cst.BaseExpression, tensor: str, kind: str, facts: Facts) -> Rewrite:
    """Ask whether a tensor has a dtype and is on an accelerator."""
    test, guard = f'{tensor}.dtype == {facts.torch}.{kind} and {tensor}.device.type != "cpu"', facts.parent(node)
    plain = isinstance(guard, (cst.If, cst.IfExp)) and guard.test is node
    return whole(node, test if plain else f"({test})", facts.needs_torch)


def _decide_class(node: cst.Call, facts: Facts) -> Rewrite | Left | None:
    """Ask for dtype and device where a script asks for a class such as `torch.cuda.FloatTensor`.

    An assertion of it fails on the CPU as before.
    """
    is_asked = text_of(node.func) == "isinstance" and len(node.args) == 2
    kind = OF_DEVICE.get(facts.name(node.args[1].value) or "") if is_asked else None
    if kind is None:
        return None
    tensor, holder = text_of(node.args[0].value), facts.parent(node)
    if isinstance(holder, cst.Assert) and holder.test is node:
        test = f'{tensor}.dtype == {facts.torch}.{DTYPES[kind]} and {tensor}.device.type != "cpu"'
        return whole(node, test, facts.needs_torch)
    test = f"isinstance({tensor}, {facts.torch}.Tensor) and {tensor}.dtype == {facts.torch}.{DTYPES[kind]}"
    rewrite = whole(node, f'({test} and {tensor}.device.type != "cpu")', facts.needs_torch)
    return Left(TYPE_QUESTION, node.children, retry=None if facts.names_others else rewrite)


def _is_type(device: cst.BaseExpression, facts: Facts) -> bool:
    """Return whether an expression is the type of a device, or certainly a name without an index."""
    if text_of(device).endswith("type"):
        return True
    values = facts.values(device)
    return (
        bool(values)
        and not facts.is_given(text_of(device), device)
        and all(_NAMES.fullmatch(text_of(value)) for value in values)
    )


def _is_vendors_device(node: cst.BaseExpression, facts: Facts) -> bool:
    """Return whether an expression is `torch.device("cuda")`, also with an index."""
    is_device = isinstance(node, cst.Call) and facts.name(node.func) == "torch.device" and bool(node.args)
    return is_device and index_of(cst.ensure_type(node, cst.Call).args[0].value)[0]


def _decide_device(node: cst.Comparison, left: cst.BaseExpression, right: cst.BaseExpression, facts: Facts) -> Left:
    """Write `device == torch.device("cuda")` so that it stays false on the CPU, also where that is all there is."""
    given, made = (left, right) if _is_vendors_device(right, facts) else (right, left)
    plain = text_of(made).replace("'", '"') in {f'torch.device("{device}")' for device in DEVICES}
    if not plain or not isinstance(node.comparisons[0].operator, cst.Equal):
        return _left(node)
    device = facts.device(node)
    device = f"{facts.torch}.device({device})" if device.endswith(".type") else device
    return Left(
        _AS_CPU, node.children, retry=whole(node, f'{text_of(given)} == {device} != {facts.torch}.device("cpu")')
    )


def _decide_flag(node: cst.Attribute, facts: Facts) -> Rewrite | Left | None:
    flag, owner = node.attr.value, text_of(node.value)
    if flag not in FLAGS or facts.name(node) is not None:
        return None
    if SETTINGS.fullmatch(owner) or f"{owner}.{flag}" in facts.assigned:
        return None
    parent = facts.parent(node)
    if "is_cuda" in facts.known.uses or (isinstance(parent, cst.Call) and parent.func is node):
        return Left(f"{flag} may be the project's own: a file sets or defines it, or it is called", node.children)
    if "pack" in owner.lower() or any("pack_" in text_of(value) for value in facts.values(node.value)):
        return Left("this may be a packed sequence, which has is_cuda and no device: ask its .data", node.children)
    if "graphs" in facts.uses_of and _GRAPH.fullmatch(owner):
        return Left("a graph of torch_geometric has is_cuda and no device: ask one of its tensors", node.children)
    if flag in {*facts.options, *facts.defined_methods} or facts.sets_attribute(flag):
        return Left(f"{flag} may be the script's own: it sets an attribute of that name", node.children)
    kind = f"{text_of(node.value)}.device.type"
    kind = f"{kind} == {facts.place.kind(node)}" if facts.names_others else kind
    return Left(_AS_CPU, node.children, retry=whole(node, f'{kind} != "cpu"'))


def _decide_place(node: cst.IfExp, facts: Facts) -> Rewrite | None:
    """Ask a tensor for its device, where a choice names it: `"cuda" if x.is_cuda else "cpu"`."""
    asks = _decide_flag(node.test, facts) if isinstance(node.test, cst.Attribute) else None
    if not isinstance(asks, Left) or asks.retry is None:
        return None
    tensor = text_of(cst.ensure_type(node.test, cst.Attribute).value)
    is_text = _is_vendor(node.body) and text_of(node.orelse) in _CPU
    names = (f"{tensor}.get_device()", f"{tensor}.device")
    if is_text or (text_of(node.body) in names and text_of(node.orelse)[13:-1] in _CPU):
        return whole(node, f"{tensor}.device.type" if is_text else f"{tensor}.device")
    return None


def _is_of_option(node: cst.Comparison, facts: Facts) -> bool:
    """Return whether a condition is the value of `pin_memory`, `fused` or autocast's `enabled`, or chooses it."""
    inner, outer = cast("cst.CSTNode", node), facts.parent(node)
    while isinstance(outer, cst.BooleanOperation) or (isinstance(outer, cst.IfExp) and inner is outer.test):
        inner, outer = outer, facts.parent(outer)
    if isinstance(outer, cst.Assign):
        return len(outer.targets) == 1 and _OPTIONS.fullmatch(text_of(outer.targets[0].target)) is not None
    if not isinstance(outer, cst.Arg) or outer.keyword is None:
        return False
    call = facts.parent(outer)
    of_amp = isinstance(call, cst.Call) and text_of(call.func).endswith(("autocast", "GradScaler"))
    return bool(_OPTIONS.fullmatch(outer.keyword.value)) or (of_amp and outer.keyword.value == "enabled")


def _falls_back(node: cst.Comparison, facts: Facts) -> bool:
    """Return whether what an `if` guards also runs on the CPU, as `if args.device == "cuda":` does if it asks again."""
    guard = facts.parent(node)
    if not isinstance(guard, cst.If) or guard.test is not node:
        return False
    return any(facts.name(call.func) == AVAILABLE and guard.body in facts.parents(call) for call in facts.calls)


def _left(node: cst.Comparison | cst.Attribute) -> Left:
    is_sure = isinstance(node, cst.Attribute) or _ABOUT.search(text_of(node)) is not None
    return Left(_AS_CPU if is_sure else _UNSURE, node.children)


def _is_vendor(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.SimpleString) and node.evaluated_value in DEVICES


def _mentions(node: cst.Comparison, facts: Facts) -> bool:
    sides = [node.left, *(target.comparator for target in node.comparisons)]
    parts = [
        element.value
        for side in sides
        for element in (side.elements if isinstance(side, (cst.List, cst.Tuple, cst.Set)) else [cst.Element(side)])
    ]
    return any(_is_vendor(part) or _is_vendors_device(getattr(part, "value", part), facts) for part in parts)


GUARDS = Rule(
    "condition",
    "conditions on a vendor's device, if all that they guard is rewritten",
    (cst.Comparison,),
    _decide,
    (
        Example(
            Level.ROLES,
            'if device.type == "cuda":\n    torch.cuda.synchronize()',
            'if device.type != "cpu":\n    accel.runtime.synchronize()',
        ),
        Example(
            Level.ROLES,
            "x = x.to(device, non_blocking=True if device.type == 'cuda' else False)",
            'x = x.to(device, non_blocking=True if device.type != "cpu" else False)',
        ),
        Example(
            Level.ROLES,
            'fast = device.type == "cuda"',
            f'# TODO(accelcore): {_AS_CPU}\nfast = device.type == "cuda"',
        ),
        Example(
            Level.ROLES,
            'use_fused = has_fused and device_type == "cuda"\noptimizer = AdamW(groups, fused=use_fused)',
            'use_fused = has_fused and device_type != "cpu"\noptimizer = AdamW(groups, fused=use_fused)',
        ),
    ),
)

CLASS = Rule(
    "type of a tensor",
    "questions whether a tensor is of a type of one device",
    (cst.Call,),
    _decide_class,
    (
        Example(
            Level.TORCH,
            "assert isinstance(x, torch.cuda.LongTensor)",
            'assert x.dtype == torch.int64 and x.device.type != "cpu"',
        ),
    ),
)

IS_CUDA = Rule(
    "is_cuda",
    "`x.is_cuda`, if all that it guards is rewritten",
    (cst.Attribute,),
    _decide,
    (
        Example(
            Level.ROLES,
            "if x.is_cuda:\n    home = x.get_device()",
            'if x.device.type != "cpu":\n    home = x.get_device()',
        ),
        Example(Level.ROLES, "if x.is_cuda:\n    x = x.cpu()", 'if x.device.type != "cpu":\n    x = x.cpu()'),
        Example(
            Level.ROLES,
            "if x.is_cuda:\n    copied(x).tofile(f)\nelse:\n    x.numpy().tofile(f)",
            'if x.device.type != "cpu":\n    copied(x).tofile(f)\nelse:\n    x.numpy().tofile(f)',
        ),
    ),
)

PLACE = Rule(
    "device of a tensor",
    "a choice of a name by `x.is_cuda`",
    (cst.IfExp,),
    _decide_place,
    (
        Example(Level.ROLES, "kind = 'cuda' if x.is_cuda else 'cpu'", "kind = x.device.type"),
        Example(Level.ROLES, "home = x.device if x.is_cuda else torch.device('cpu')", "home = x.device"),
    ),
)

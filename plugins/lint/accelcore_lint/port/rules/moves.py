"""`x.cuda()` and `x.npu()`: moves of tensors and modules."""

from __future__ import annotations

import re
from typing import cast

import libcst as cst

from accelcore_lint.port.device_names import index_source, is_device_name
from accelcore_lint.port.device_sources import device_source
from accelcore_lint.port.facts import Facts
from accelcore_lint.port.own_classes import movers
from accelcore_lint.port.receivers import is_of_stranger, is_own, is_torchs, loses_value
from accelcore_lint.port.rule import Example, Left, Level, Rewrite, Rule
from accelcore_lint.port.rules.replaced import kept_for_test
from accelcore_lint.port.syntax import arguments, text_of
from accelcore_lint.port.vendors import DEVICES, SETTINGS
from accelcore_lint.port.walk import find

_STORAGE = re.compile(r"[sS]torage(\([^()]*\))?$")
_PLAIN = re.compile(r"[\w.]+(\[[\w.-]+\])*")
"""An expression that may be written twice."""

_SUPER = re.compile(r"super\(\w+, *\w+\)")
_VENDOR = re.compile(rf"\b({'|'.join(DEVICES)})\b")
_DEVICE_OF = re.compile(r"(\w+(?:\.\w+)*)\.get_device\(\)")
_OWN_DEVICE = "get_device() may be the project's own, of an object that has no device: give the device itself"


def _decide(node: cst.Call, facts: Facts) -> Rewrite | Left | None:
    func = node.func
    if (number := _device_argument(node, facts)) is not None:
        return _decide_number(node, number, facts)
    if not isinstance(func, cst.Attribute) or func.attr.value not in DEVICES or facts.name(func) is not None:
        return None
    method = func.attr.value
    may_be_own = (is_own(func.value, facts) or facts.known.strange_moves) and (
        facts.known.meets_movers or facts.is_library
    )
    is_defined = method in facts.defined_methods and bool(movers(facts.code))
    may_be_own = (is_defined or may_be_own) and not is_torchs(node, facts)
    if may_be_own and _is_ported_method(node, method, facts):
        return Left("a method of the project's own class, in which no line is left", harmless=True)
    if text_of(func.value) == "super()" or (may_be_own and _SUPER.fullmatch(text_of(func.value))):
        return Left(f"the inherited {method}(): call to(device) where this method is called")
    if may_be_own and is_defined:
        return Left(f"this file defines a method {method}, which may be the one that is called")
    if may_be_own:
        return Left(f"the project has a class with a method {method} ({facts.known.movers}), which this may call")
    if loses_value(node, facts):
        return Left("an object of a class whose own to() returns nothing: call that in a line of its own")
    if is_of_stranger(func.value, facts):
        return Left(f"an object of another package's class, which may have no to(): it has {method}()")
    if _STORAGE.search(text_of(func.value)) or _is_mapped(func.value, facts):
        return Left("a storage, which moves by to(device=...): a tensor's memory is no part of a training script")
    given = arguments(node, "device", "non_blocking")
    if given is None:
        return Left(f"arguments of {method}() that are not known")
    index = given.pop("device").value if "device" in given else None
    if index is not None and (_is_tensors(index, facts) or _is_made_of_device(index, facts)):
        source: str | Left = text_of(index)
    elif index is not None and _is_device(index, facts):
        source = _or_current(text_of(index), node, facts)
    elif isinstance(index, cst.Call) and (tensor := _DEVICE_OF.fullmatch(text_of(index))):
        source = Left(_OWN_DEVICE) if _is_own_device(index, tensor[1], facts) else f"{tensor[1]}.device"
    else:
        source = device_source(facts, node, index)
    if isinstance(source, Left) and index is not None and facts.place.is_apart(node):
        source = _as_given(node, index, facts) or source
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


def _is_mapped(moved: cst.BaseExpression, facts: Facts) -> bool:
    """Return whether a lambda moves what may be the storage that `torch.load` gives it beside an unused name."""
    outer = next((each for each in facts.parents(moved) if isinstance(each, cst.Lambda)), None)
    names = [param.name.value for param in outer.params.params] if outer is not None else []
    is_first = len(names) == 2 and text_of(moved) == names[0]
    return is_first and outer is not None and ".load(" in facts.code and names[1] not in facts.names_in(outer.body)


def _is_ported_method(node: cst.Call, method: str, facts: Facts) -> bool:
    """Return whether the project's only class that defines `cuda` has the called one, with moves that are rewritten.

    The call is `self.cuda(...)` in that class, or of what only this class has made. An earlier run may have rewritten
    the moves. No other class may define one: it may inherit from this class.
    """
    own, others = movers(facts.code), facts.known.movers
    if len(own) != 1 or (others and not re.fullmatch(rf"{own[0]} in [^,]+", others)):
        return False
    moved = cst.ensure_type(node.func, cst.Attribute).value
    around = [outer for outer in facts.parents(node) if isinstance(outer, cst.ClassDef)]
    values = [moved] if isinstance(moved, cst.Call) else facts.values(moved)
    is_made = bool(values) and all(isinstance(each, cst.Call) and text_of(each.func) == own[0] for each in values)
    is_made = is_made and not facts.is_given(text_of(moved), moved)
    if not is_made and (text_of(moved) != "self" or [each.name.value for each in around[:1]] != own):
        return False
    made = next((each for each in find(facts.module, cst.ClassDef) if each.name.value == own[0]), None)
    parts = made.body.body if made is not None else ()
    methods = [part for part in parts if isinstance(part, cst.FunctionDef) and part.name.value == method]
    if len(methods) != 1 or methods[0] in facts.parents(node):
        return False
    calls = [call for call in facts.calls if methods[0] in facts.parents(call)]
    moves = [call for call in calls if _is_move(call)]
    known = (text_of(call.func).endswith(".to") or (facts.name(call.func) or "").startswith("torch.") for call in calls)
    if not calls or not all(is_known or call in moves for is_known, call in zip(known, calls, strict=True)):
        return False
    words = _VENDOR.findall(text_of(methods[0].body))
    return len(words) == len(moves) and all(isinstance(_decide(move, facts), Rewrite) for move in moves)


def _is_move(call: cst.Call) -> bool:
    return isinstance(call.func, cst.Attribute) and call.func.attr.value in DEVICES


def _as_given(node: cst.Call, index: cst.BaseExpression, facts: Facts) -> str | None:
    """Return the source of a device that is a number or None, as it is given: `to` takes numbers as `cuda` does."""
    source = index_source(index)
    if _PLAIN.fullmatch(source):
        return _or_current(source, node, facts)
    is_number = isinstance(index, cst.BinaryOperation) and "'" not in source and '"' not in source
    return source if is_number else None


def _or_current(device: str, node: cst.CSTNode, facts: Facts) -> str:
    """Return the source of a device that may be None, with which `to` moves nothing, unless a condition says it is not.

    Such a condition is `if device.type == "cuda":`, `if args.gpu is not None:` or `if gpu >= 0:`.
    """
    known = re.compile(rf"{re.escape(device)}(\.type\b.*| is not None| *[<>]=? *-?\d+)")
    inner = node
    for outer in facts.parents(node):
        if isinstance(outer, cst.FunctionDef):
            break
        if isinstance(outer, cst.If | cst.IfExp) and inner is outer.body and known.fullmatch(text_of(outer.test)):
            return device
        inner = outer
    return f"{device} if {device} is not None else {facts.place.device(node)}"


def _is_tensors(device: cst.BaseExpression, facts: Facts) -> bool:
    """Return whether an expression is the device of another tensor, as in `x.cuda(y.device)`."""
    if not isinstance(device, cst.Attribute) or device.attr.value != "device" or text_of(device) in facts.assigned:
        return False
    return not SETTINGS.fullmatch(text_of(device.value)) and facts.name(device) is None


def _is_made_of_device(index: cst.BaseExpression, facts: Facts) -> bool:
    """Return whether a move's argument is made of the script's own device, as in `x.cuda(torch.device(device))`."""
    if not isinstance(index, cst.Call) or facts.name(index.func) != "torch.device" or len(index.args) != 1:
        return False
    given = index.args[0].value
    is_named = isinstance(given, (cst.Name, cst.Attribute)) and is_device_name(text_of(given))
    return is_named and not (facts.is_whole(given) or facts.is_local_rank(given) or facts.is_current(given))


def _is_own_device(call: cst.Call, owner: str, facts: Facts) -> bool:
    """Return whether `x.get_device()` may be a module's function, or a method of the project's own."""
    return owner in ("self", "cls") or facts.name(call.func) is not None or "get_device" in facts.uses_of


def _is_device(index: cst.BaseExpression, facts: Facts) -> bool:
    """Return whether the argument of a move is the script's own name of a device, which is never None."""
    if isinstance(index, cst.Name):
        made = [
            isinstance(value, cst.Call) and facts.name(value.func) == "torch.device" for value in facts.values(index)
        ]
        given = facts.is_given(index.value, index)
        return (bool(made) and all(made) and not given) or (is_device_name(index.value) and not facts.is_whole(index))
    values = [text_of(value) for value in facts.values(index)]
    known = bool(values) and not facts.is_local_rank(index) and not facts.is_whole(index)
    known = known and any(value != "None" for value in values)
    return isinstance(index, cst.Attribute) and is_device_name(index.attr.value) and known


def _device_argument(node: cst.Call, facts: Facts) -> cst.Arg | None:
    """Return the argument of `x.to(...)`, or of a function such as `torch.zeros`, that is this rank's number."""
    is_to = isinstance(node.func, cst.Attribute) and node.func.attr.value in ("to", "to_empty")
    name = facts.name(node.func) or ""
    is_torchs = name.startswith("torch.") and not name.startswith("torch.cuda.")
    for arg in node.args if is_to or is_torchs else ():
        keyword = arg.keyword.value if arg.keyword else None
        is_first = is_to and arg is node.args[0] and keyword is None and not arg.star
        if (is_first or keyword == "device") and (facts.is_local_rank(arg.value) or facts.is_current(arg.value)):
            return arg
    return None


def _decide_number(node: cst.Call, number: cst.Arg, facts: Facts) -> Rewrite | None:
    """Replace this rank's number as a device, which needs an accelerator."""
    source = device_source(facts, node, number.value)
    if isinstance(source, Left):
        return None
    device, at = cst.parse_expression(source), node.args.index(number)

    def build(updated: cst.Call) -> cst.Call:
        args = list(updated.args)
        args[at] = args[at].with_changes(value=device)
        return updated.with_changes(args=args)

    return Rewrite(build, [number])


MOVES = Rule(
    "move",
    "`.cuda()` and `.npu()`",
    (cst.Call,),
    lambda node, facts: kept_for_test(_decide(node, facts), node, facts),
    (
        Example(Level.TORCH, "x = x.cuda(non_blocking=True)", "x = x.to(device, non_blocking=True)"),
        Example(Level.ROLES, "model = Net().cuda()", "model = Net().to(accel.device)"),
        Example(Level.ROLES, "model.cuda(local_rank)", "model.to(accel.device)"),
        Example(Level.ROLES, "window = window.cuda(x.get_device())", "window = window.to(x.device)"),
        Example(Level.ROLES, "x = x.to(local_rank)", "x = x.to(accel.device)"),
        Example(Level.ROLES, "x = torch.ones(2, device=local_rank)", "x = torch.ones(2, device=accel.device)"),
    ),
)

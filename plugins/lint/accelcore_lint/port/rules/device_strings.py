"""Strings that name a device: `"cuda"`, `"cuda:0"`, `f"cuda:{rank}"`, and where a device is chosen between them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from accelcore_lint.port.device_names import branches, index_of, is_device_name, is_for_autocast
from accelcore_lint.port.device_sources import (
    default_source,
    device_source,
    has_indexes,
    kind_source,
    location_source,
)
from accelcore_lint.port.facts import Facts
from accelcore_lint.port.guards import is_below_any, is_further
from accelcore_lint.port.options import are_read_in
from accelcore_lint.port.rule import Example, Left, Level, Rewrite, Rule
from accelcore_lint.port.rules.other_packages import GIVEN, is_given_away
from accelcore_lint.port.rules.replaced import kept_for_test
from accelcore_lint.port.syntax import argument, key_of, text_of
from accelcore_lint.port.uses import ASSERTED, BY_PLACE, HIDDEN
from accelcore_lint.port.vendors import DEVICES
from accelcore_lint.port.walk import find

_LOCATION = re.compile(r"(^|[._])(loc|map_loc|map_location)$")
AVAILABLE = "torch.cuda.is_available"
_OTHERS = ("torch.backends.mps.is_available", "torch.xpu.is_available", "torch.mps.is_available")
_OTHER_DEVICES = ("mps", "xpu", "cpu")

_LOOKS_UP = ("get", "pop", "setdefault", "getattr", "getenv")
"""Functions that return a default if there is no such key or attribute."""

BEGINS = "a question about one vendor's device: other accelerators answer no"
NAMED = "the name of a device, of which this file asserts that it is one of a list: add others there"
CHOSEN = "the default of an option whose choices are devices"
DECLARED = "a process that only declares options may not be the one that trains: choose this where the option is used"

_MAY_LACK = "device index {} under a condition that asks for any device: there may be one only, so ask for their number"

_VENDOR = re.compile(rf"\b({'|'.join(DEVICES)})\b")

_COMPARED = "a name that is compared with the name and number of one vendor's device: change both"
_CALLED = re.compile(r"assert_(?:\w+_)?(?:called|calls|awaited|awaits)\w*$")
_EXPECTED = Left("a name that a test expects of what it replaces: change it with the line that gives it")

_AUTOCAST = Left("the device of an autocast: write the device's type, and enabled= if autocast shall be off on the CPU")


def whole(node: cst.BaseExpression, text: str, imports: Sequence[str] = ()) -> Rewrite:
    """Return the decision to replace an expression by another source; the parts are gone."""
    new = cst.parse_expression(text)

    def build(updated: cst.BaseExpression) -> cst.BaseExpression:
        return new.with_changes(lpar=updated.lpar, rpar=updated.rpar) if updated.lpar else new

    return Rewrite(build, node.children, imports)


def names_option(facts: Facts, node: cst.CSTNode) -> bool:
    """Return whether a string is the name of the script's own option: `add_argument("--gpu", dest="cuda")`."""
    arg = facts.parent(node)
    return isinstance(arg, cst.Arg) and arg.keyword is not None and arg.keyword.value == "dest"


def _chosen(facts: Facts, node: cst.BaseExpression) -> list[cst.BaseExpression] | None:
    """Return the vendor's names in a choice such as `"cuda" if torch.cuda.is_available() else "cpu"`; None if other."""
    if isinstance(node, cst.SimpleString) and node.evaluated_value in _OTHER_DEVICES:
        return []
    if index_of(node)[0]:
        return [node]
    if isinstance(node, cst.Call) and facts.name(node.func) == "torch.device" and len(node.args) == 1:
        return _chosen(facts, node.args[0].value)
    if (
        isinstance(node, cst.IfExp)
        and isinstance(node.test, cst.Call)
        and facts.name(node.test.func) in (AVAILABLE, *_OTHERS)
    ):
        body, other = _chosen(facts, node.body), _chosen(facts, node.orelse)
        return None if body is None or other is None else body + other
    return None


def _decide_choice(node: cst.Call | cst.IfExp, facts: Facts) -> Rewrite | Left | None:
    """Replace a whole choice, or a `torch.device` of a vendor's name."""
    choice: cst.BaseExpression = node
    if isinstance(node, cst.Call):
        if facts.name(node.func) != "torch.device" or not node.args or node.args[0].keyword is not None:
            return None
        choice = node.args[0].value
        if len(node.args) == 2 and index_of(choice) == (True, None):
            source = device_source(facts, node, node.args[1].value)
            return source if isinstance(source, Left) else whole(node, source)
        if len(node.args) != 1:
            return None
        if facts.is_current(choice):
            source = _as_device(facts, device_source(facts, node, choice))
            return source if isinstance(source, Left) else whole(node, source)
    elif isinstance(facts.parent(node), cst.IfExp):
        return None
    names = _chosen(facts, choice)
    if not names:
        return None
    if is_given_away(node, facts, to_any=False):
        return Left(GIVEN, node.children)
    if facts.submits and is_device_name(key_of(facts.parent(node))):
        return Left(DECLARED, node.children)
    option = facts.parent(facts.parent(node) or node)
    if isinstance(option, cst.Call) and option in facts.options.values() and argument(option, "choices") is not None:
        return Left(CHOSEN, node.children)
    if is_further(further := index_of(names[0])[1]) and is_below_any(names[0], facts.parents):
        return Left(_MAY_LACK.format(text_of(further or node)), node.children)
    reason = (facts.hides_all and HIDDEN) or (ASSERTED.search(facts.code) and NAMED)
    if reason and len(branches(choice)) > 1:
        return Left(reason, node.children)
    decision = _rewritten(node, facts, choice, names)
    # Its own reason first: that of another line may be this one.
    keeps = facts.keeps(node) if len(branches(choice)) > 1 and not isinstance(decision, Left) else ""
    return Left(keeps, node.children) if keeps else decision


def _rewritten(
    node: cst.BaseExpression, facts: Facts, choice: cst.BaseExpression, names: list[cst.BaseExpression]
) -> Rewrite | Left | None:
    """Replace a choice of a device, which nothing else keeps, by the accelerator's device or its name."""
    made = [not index_of(branch)[0] and isinstance(branch, cst.Call) for branch in branches(choice)]
    if any(made):
        return _of_devices(facts, node, names) if all(made) and choice is node else None
    index = index_of(names[0])[1]
    if len(names) != 1 or _has_others(choice, facts):
        return None
    if isinstance(node, cst.Call):
        source = device_source(facts, node, index) if not isinstance(choice, cst.IfExp) else _inline(facts, node, index)
        source = _as_device(facts, source)
    elif index is not None and has_indexes(facts, node, index) and not (text_of(index) == "0" and facts.is_own(index)):
        return None  # the string is rewritten, and the choice stays
    else:
        source = _inline(facts, node, index)
        if isinstance(source, str) and index is not None and (source.endswith(".device") or " if " in source):
            source = f"str{source}" if source.endswith(")") else f"str({source})"
        elif not isinstance(source, Left):
            source = f"({source}).type" if " or " in source else f"{source.removesuffix('.type')}.type"
    return source if isinstance(source, Left) else whole(node, source)


def _has_others(choice: cst.BaseExpression, facts: Facts) -> bool:
    """Return whether a choice has another accelerator, which torch knows and accelcore may not: it stays a choice."""
    is_torchs = facts.level is Level.TORCH or facts.place.is_apart(choice)
    return not is_torchs and any(
        isinstance(branch, cst.SimpleString) and branch.evaluated_value not in (*DEVICES, "cpu")
        for branch in branches(choice)
        if not index_of(branch)[0]
    )


def _of_devices(facts: Facts, node: cst.BaseExpression, names: list[cst.BaseExpression]) -> Rewrite | Left | None:
    """Replace `torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")`."""
    if len(names) != 1:
        return None
    source = _as_device(facts, _inline(facts, node, index_of(names[0])[1]))
    return source if isinstance(source, Left) else whole(node, source)


def _as_device(facts: Facts, source: str | Left) -> str | Left:
    """Return the source of a `torch.device` for that of a device or of its name."""
    is_name = isinstance(source, str) and source.endswith(".type")
    return f"{facts.torch}.device({source})" if is_name else source


def _inline(facts: Facts, node: cst.CSTNode, index: cst.BaseExpression | None) -> str | Left:
    """Return the source of the accelerator's device, or of the CPU's; at level TORCH as the script's own choice."""
    if facts.level is not Level.TORCH or index is not None:
        source = device_source(facts, node, index)
        if isinstance(source, str) and source.endswith(")") and " if " not in source:  # torch.load refuses "cpu:0"
            device = facts.place.device(node)
            source = f'({source} if {device}.type != "cpu" else {device})'
        return source
    if isinstance(facts.parent(node), (cst.Assign, cst.AnnAssign, cst.Return)):
        return f'{facts.torch}.accelerator.current_accelerator(check_available=True) or {facts.torch}.device("cpu")'
    return facts.place.device(node)


def _decide_string(node: cst.BaseExpression, facts: Facts) -> Rewrite | Left | None:
    """Replace a string where its place says that it is a device."""
    named, index = index_of(node)
    if not named or names_option(facts, node):
        return None
    wanted = _wanted(facts, node)
    if wanted is None:
        return None
    if isinstance(wanted, Left):
        return wanted
    if is_given_away(node, facts, to_any=False):
        return Left(GIVEN)
    if _is_expected(facts, node):
        return _EXPECTED
    if ASSERTED.search(facts.code) and not _is_for_torch(facts, node):
        return Left(NAMED)
    if BY_PLACE.search(facts.code) and not _is_for_torch(facts, node):
        return Left(facts.keeps_questions)
    if is_further(index) and is_below_any(node, facts.parents):
        return Left(_MAY_LACK.format(text_of(index or node)))
    if index is not None and _is_compared(node, facts):
        return Left(_COMPARED)
    sources = {"location": location_source, "kind": kind_source, "default": default_source}
    source_of = sources.get(wanted, device_source)
    source = source_of(facts, node, index)
    return source if isinstance(source, Left) else whole(node, source)


def _is_compared(node: cst.BaseExpression, facts: Facts) -> bool:
    """Return whether a name that gets a device is compared with the text of one and its number, which stays."""
    holder = facts.parent(node)
    name = text_of(holder.targets[0].target) if isinstance(holder, cst.Assign) else ""
    for each in find(facts.module, cst.Comparison) if name else ():
        sides = [each.left, *(target.comparator for target in each.comparisons)]
        made = any(index_of(side)[1] is not None and not isinstance(side, cst.SimpleString) for side in sides)
        if made and name in map(text_of, sides):
            return True
    return False


def _is_expected(facts: Facts, node: cst.CSTNode) -> bool:
    """Return whether a test compares a name with what a function has got that it replaces."""
    around = list(facts.parents(node))
    names = [text_of(outer.func).split(".")[-1] for outer in around if isinstance(outer, cst.Call)]
    if any(_CALLED.match(name) for name in names):
        return True
    compares = any(isinstance(outer, (cst.Assert, cst.Comparison)) for outer in around)
    compares = compares or any(name.startswith("assert") for name in names)
    return bool(facts.known.replaced) and compares and any(isinstance(outer, cst.DictElement) for outer in around)


def _is_for_torch(facts: Facts, node: cst.CSTNode) -> bool:
    """Return whether a device is an argument of a function of torch, or of a move, and no other line gets its name."""
    calls = [outer.func for outer in facts.parents(node) if isinstance(outer, cst.Call)]
    return any((facts.name(func) or "").startswith("torch.") or text_of(func).endswith(".to") for func in calls)


def _wanted(facts: Facts, node: cst.CSTNode) -> str | Left | None:
    """Return what belongs at a node: a `"device"`, the `"location"` of `torch.load`, or a string.

    The string is the `"kind"` of a device, or an option's `"default"`.
    None: the string is a docstring, a key, or a side of a comparison.
    """
    unknown = Left("a device's name in a place where it is not certain that it chooses a device")
    holder = facts.parent(node)
    nested = False
    while isinstance(holder, (cst.IfExp, cst.BooleanOperation)):
        nested = True
        if isinstance(holder, cst.IfExp) and holder.test is node:
            return None
        node, holder = holder, facts.parent(holder)
    if isinstance(holder, (cst.Expr, cst.Comparison, cst.ComparisonTarget, cst.ConcatenatedString, cst.Index)):
        return None
    if isinstance(holder, cst.DictElement) and holder.key is node:
        return None
    if isinstance(holder, cst.Arg):
        return _wanted_argument(facts, holder, nested=nested) or unknown
    name = None
    if isinstance(holder, cst.Assign) and len(holder.targets) == 1:
        name = text_of(holder.targets[0].target)
        if "environ[" in name:
            return Left("an environment variable: write the device's type if what reads it takes any device")
    elif isinstance(holder, cst.AnnAssign):
        name = text_of(holder.target)
    elif isinstance(holder, cst.Param):
        name = holder.name.value
    elif isinstance(holder, cst.DictElement) and isinstance(holder.key, cst.SimpleString):
        name = str(holder.key.evaluated_value)
    if isinstance(holder, cst.Return) and facts.guards(node) and AVAILABLE not in facts.known.replaced:
        name = next(outer.name.value for outer in facts.parents(holder) if isinstance(outer, cst.FunctionDef))
    is_option = isinstance(holder, cst.DictElement) and name == "device_type"
    if is_option or (name is not None and is_for_autocast(name, facts.code)):
        return _AUTOCAST
    is_field = isinstance(holder, cst.AnnAssign) and not nested and facts.is_field(holder)
    if is_field and _VENDOR.search(text_of(cst.ensure_type(holder, cst.AnnAssign).annotation.annotation)):
        return unknown  # as in Literal["cuda", "cpu"]
    if (is_field and facts.is_library) or (facts.submits and (is_field or is_device_name(key_of(holder)))):
        return Left(DECLARED)
    if name is not None and is_device_name(name):
        return "location" if _LOCATION.search(name) else "kind"
    return unknown


def _wanted_argument(facts: Facts, arg: cst.Arg, *, nested: bool) -> str | Left | None:
    call = facts.parent(arg)
    if not isinstance(call, cst.Call):
        return None
    keyword = arg.keyword.value if arg.keyword else None
    first = call.args[0] is arg
    name = facts.name(call.func) or ""
    method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
    if method == "startswith":
        return Left(BEGINS)
    if keyword == "device_type" and text_of(call.func).split(".")[-1] in ("partial", "dict"):
        return _AUTOCAST
    if (
        name == "torch.device"
        or (keyword == "device_type" and (name.startswith("torch.") or isinstance(call.func, cst.Name)))
        or (name.startswith("torch.distributed.") and name.endswith(".init_device_mesh") and first)
        or (name in ("torch.autocast", "torch.amp.GradScaler", "torch.set_default_device") and first)
    ):
        return "kind"
    if method == "add_argument" and keyword == "default":
        options = [
            text_of(other.value).strip("\"'").lstrip("-").replace("-", "_") for other in call.args if not other.keyword
        ]
        if not any(map(is_device_name, options)):
            return None
        if argument(call, "choices") is not None:
            return Left(CHOSEN)
        return "default" if nested or are_read_in(facts, call) else Left(DECLARED)
    if text_of(call.func).split(".")[-1] in _LOOKS_UP and call.args[-1] is arg and not first:
        key = call.args[-2].value
        is_key = isinstance(key, cst.SimpleString) and is_device_name(str(key.evaluated_value))
        return "kind" if is_key else None
    is_torchs = name.startswith("torch.") or (method == "to" and (first or keyword == "device"))
    if name == "torch.load" and (keyword == "map_location" or call.args.index(arg) == 1):
        return "location"
    by_name = method == "to" and "text_to" in facts.uses_of
    if (
        (keyword == "device" or (method == "to" and first and keyword is None))
        and is_torchs
        and not (nested or by_name)
    ):
        return "device"
    if keyword == "map_location":
        return "location"
    return "kind" if keyword in ("device", "device_map") or (method == "to" and first) else None


CHOICES = Rule(
    "device",
    "choice of a device",
    (cst.Call, cst.IfExp),
    lambda node, facts: kept_for_test(_decide_choice(node, facts), node, facts),
    (
        Example(
            Level.TORCH,
            'device = torch.device("cuda" if torch.cuda.is_available() else "cpu")',
            'device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")',
        ),
        Example(
            Level.ROLES,
            'device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")',
            "device = accel.device",
        ),
        Example(Level.ROLES, 'device = "cuda" if torch.cuda.is_available() else "cpu"', "device = accel.device.type"),
        Example(
            Level.ROLES,
            'device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")',
            "device = accel.device",
        ),
    ),
)

STRINGS = Rule(
    "device string",
    "the name of a device where a device is expected",
    (cst.SimpleString, cst.FormattedString, cst.BinaryOperation, cst.Call),
    lambda node, facts: kept_for_test(_decide_string(node, facts), node, facts),
    (
        Example(Level.TORCH, 'x = torch.zeros(2, device="cuda")', "x = torch.zeros(2, device=device)"),
        Example(Level.ROLES, 'x = torch.zeros(2, device="cuda")', "x = torch.zeros(2, device=accel.device)"),
        Example(Level.ROLES, 'model.to(f"cuda:{local_rank}")', "model.to(accel.device)"),
        Example(
            Level.ROLES,
            'state = torch.load(path, map_location="cuda:0")',
            "state = torch.load(path, map_location=accel.device)",
        ),
        Example(Level.ROLES, 'train(model, device="cuda")', "train(model, device=accel.device.type)"),
        Example(Level.ROLES, 'dev = "cuda:0"', "dev = str(accel.device)"),
        Example(
            Level.ROLES,
            'class Options:\n    device: str = "cuda"',
            f'class Options:\n    # TODO(accelcore): {DECLARED}\n    device: str = "cuda"',
        ),
    ),
)

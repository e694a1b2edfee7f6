"""Questions about devices: `torch.cuda.is_available()`, `device_count()`, `current_device()`."""

from __future__ import annotations

import re
from typing import cast

import libcst as cst

from accelcore_lint.port.device_names import index_of, is_device_name
from accelcore_lint.port.facts import Facts
from accelcore_lint.port.guards import is_further
from accelcore_lint.port.options import are_read_in
from accelcore_lint.port.place import UnplacedError
from accelcore_lint.port.project import OTHERS
from accelcore_lint.port.questions import guard_of
from accelcore_lint.port.rule import Example, Left, Level, Rewrite, Rule
from accelcore_lint.port.rules.device_counts import at_least_one, needs_one
from accelcore_lint.port.rules.device_strings import AVAILABLE, NAMED, whole
from accelcore_lint.port.rules.loading import is_state, loads_twice
from accelcore_lint.port.rules.other_packages import GIVEN, is_given_away
from accelcore_lint.port.rules.seeds import DRAWS_AGAIN, draws_again
from accelcore_lint.port.syntax import argument, key_of, text_of
from accelcore_lint.port.uses import ASSERTED, HIDDEN, flags_of_loads, flags_that_hide
from accelcore_lint.port.vendors import DEVICES
from accelcore_lint.port.walk import find

LEFT = "a condition on one vendor's device: what it guards is left"
_LEFT_COUNT = "the number of one vendor's devices: a line that depends on it is left"
_NOT_CERTAIN = "it is not certain that others may answer as it does"
_GIVES_EACH = re.compile(r"[\"'](?:CUDA|ASCEND_RT)_VISIBLE_DEVICES=[{%]")
_COUNTS = (
    "the number of one vendor's devices: commands get one each by CUDA_VISIBLE_DEVICES, which other devices do not read"
)
WITHOUT_CAUSE = {
    LEFT: f"a condition on one vendor's device: {_NOT_CERTAIN}",
    _LEFT_COUNT: f"the number of one vendor's devices: {_NOT_CERTAIN}",
}
"""Reasons that name a line that is left, and what to say if there is no such line."""

_CONTEXT = "a condition on one vendor's device: this file has a context torch.cuda.device(...), which fails on others"
HIDES = "a condition on one vendor's device: where it is true, a file hides devices by an environment variable"
_OTHER = "a condition on one vendor's device and on another accelerator, which torch's current device may be"
_LOADS = "where there is no CUDA, what it saved is loaded to the CPU, from which other devices take it"
_FLAG = "a flag by which a state is loaded to where CUDA saved it, or to the CPU: give torch.load the device itself"
_CONFIGURED = "a move beside a device that a configuration gives the program, which may be the CPU: move to that one"
_ELSEWHERE = (
    "a choice of a device whose name comes from elsewhere or has an index: others may not have it, so change both"
)
_MOVES = re.compile(rf"\.({'|'.join(DEVICES)})\(|\.to\((device *= *)?[\"']({'|'.join(DEVICES)})\b")
_NAMES = re.compile(rf"[\"']({'|'.join(DEVICES)})\b")
_AS_DEVICE = "the number of the current device, which stands for a device: take torch.accelerator.current_accelerator()"
_CPU_NAME = re.compile(r"(?:\w+\.device\()?[\"']cpu[\"']\)?")
_PLACE = (
    rf"(?:{_CPU_NAME.pattern}|{{[^{{}}]*: *[\"']cpu[\"'],? *}}|lambda \w+, *\w+: *\w+(?:\.cpu\(\))?(?m:$|(?=[,}}])))"
)
_AT_CPU = re.compile(
    rf"(?P<name>[\w.]*(?:map_loc(?:ation)?|\bloc)) *= *{_PLACE}"
    rf"|(?P<key>[\"']map_location[\"'])(?:\] *=|:) *{_PLACE}|\breturn +{_CPU_NAME.pattern}"
)
"""A place of the CPU for torch.load: by a name, in a dict, or what a function returns."""

_NUMBER = re.compile(r"(?i)(rank|gpus?|ids?|idx|index|ordinal|num(ber)?)[\"'\])]*$")
"""An expression that is the number of a device rather than its name."""

_LOOKS_UP = ("get", "pop", "getattr")
_SAME = {"torch.cuda.device_count": "device_count", "torch.cuda.current_device": "current_device_index"}


def _decide(node: cst.Call | cst.Attribute | cst.Name, facts: Facts) -> Rewrite | Left | None:
    if not isinstance(node, cst.Call) and (rewrite := at_least_one(node, facts)) is not None:
        return rewrite
    if isinstance(node, cst.Name):
        return None
    if isinstance(node, cst.Attribute):  # a test of the function itself, whose parentheses are forgotten: always true
        holder = facts.parent(node)
        is_test = isinstance(holder, cst.UnaryOperation) or getattr(holder, "test", None) is node
        is_test = is_test and facts.name(node) == AVAILABLE
        return whole(node, f"{facts.torch}.accelerator.is_available", facts.needs_torch) if is_test else None
    name = facts.name(node.func)
    if name == "torch.cuda.get_device_name" and facts.level is not Level.TORCH:
        return _decide_name(node, facts)
    if name is None or node.args:
        return None
    if name == AVAILABLE:
        return _decide_available(node, facts)
    if name == "torch.cuda.is_bf16_supported" and facts.level is not Level.TORCH:
        backend = facts.place.backend(node)
        source = f'"bfloat16" in {backend}.capabilities.autocast_dtypes'
        if not facts.guards(node):  # CUDA's function is false on the CPU, which has bfloat16
            source = f'{backend}.device.type != "cpu" and {source}'
        return whole(node, source)
    if name == "torch.cuda.get_rng_state":
        if draws_again(node, facts):
            return Left(DRAWS_AGAIN, node.children)
        of = "" if facts.level is Level.TORCH else facts.place.device(node)
        source = f"{facts.torch}.get_device_module({of}).get_rng_state()"
        if not facts.guards(node):  # the CPU's module has none
            source = f"{source} if {available(facts, node)} else None"
        return whole(node, source, facts.needs_torch)
    if name not in _SAME:
        return None
    is_count = name.endswith(".device_count")
    if not is_count and not facts.guards(node) and (target := _named_device(node, facts)) is not None:
        code = _code_around(node, facts)
        only_moves = target == "device" and len(_uses(target, code)) == len(_moves_to(target, code)) + 1
        return (
            whole(node, facts.place.device(node), facts.needs_torch) if only_moves else Left(_AS_DEVICE, node.children)
        )
    holder = facts.parent(node)
    given_as = holder.keyword if isinstance(holder, cst.Arg) else getattr(holder, "name", None)
    if not is_count and isinstance(given_as, cst.Name) and given_as.value == "map_location":
        return whole(node, facts.place.device(node), facts.needs_torch)  # torch.load takes no number
    if not is_count and isinstance(given_as, cst.Name) and given_as.value == "device":
        return Left(_AS_DEVICE, node.children)
    source = f"{facts.torch}.accelerator.{_SAME[name]}()"
    test = f"{facts.torch}.accelerator.is_available()"
    if not facts.guards(node) and is_count:
        # As CUDA's own, this may be asked before a fork, unlike is_available, and needs no driver, unlike torch 2.7's.
        test = f"{facts.torch}.accelerator.current_accelerator()"
        of = "" if needs_one(node, facts) else test  # without a name, it is the CPU's module if there is no device
        source = f"{facts.torch}.get_device_module({of}).device_count()"
    if is_count and needs_one(node, facts):
        source = f"max({source}, 1)"
    elif not facts.guards(node):
        source = f"({source} if {test} else 0)"
    made = whole(node, source, facts.needs_torch)
    if is_given_away(node, facts):
        return Left(GIVEN, node.children)
    if is_count and _GIVES_EACH.search(facts.code):
        return Left(_COUNTS, node.children)
    decides = isinstance(guard_of(node, facts), (cst.If, cst.IfExp))
    return Left(LEFT if decides else _LEFT_COUNT, node.children, retry=made, some=True) if is_count else made


def _named_device(node: cst.Call, facts: Facts) -> str | None:
    """Return what is assigned a number that then stands for a device, as in `x.to(device)`: 0 would be no CPU."""
    holder = facts.parent(node)
    target = text_of(holder.targets[0].target) if isinstance(holder, cst.Assign) else ""
    if target.endswith(".device") or (target == "device" and _moves_to(target, _code_around(node, facts))):
        return target
    return None


def _code_around(node: cst.CSTNode, facts: Facts) -> str:
    """Return the source in which a name that a line assigns is known: its function's, or the file's."""
    function = facts.function_of(node)
    return facts.code if function is None else text_of(function)


def _uses(name: str, code: str) -> list[str]:
    return re.findall(rf"(?<![\w.]){re.escape(name)}(?!\w|=)", code)


def _moves_to(name: str, code: str) -> list[str]:
    return re.findall(rf"(?:\.to\(|(?<!\.cuda\()\bdevice=){re.escape(name)}\s*[,)]", code)


def _decide_name(node: cst.Call, facts: Facts) -> Rewrite | None:
    """Ask the module that torch has for the device; those of the CPU and of MPS have no names."""
    device = facts.place.device(node)
    given = ", ".join(text_of(arg) for arg in node.args if not facts.is_current(arg.value))
    if any(f"{device}." in given or f"{device}:" in given for device in DEVICES):
        return None
    source = f"{facts.torch}.get_device_module({device})"
    if facts.guards(node) and device.endswith(".device"):
        source = f"{source}.get_device_name({given})"
    else:  # torch's current device may be MPS
        source = f'getattr({source}, "get_device_name", lambda *_: {device}.type)({given})'
    return whole(node, source, facts.needs_torch)


def _decide_available(node: cst.Call, facts: Facts) -> Left:
    """Ask for any accelerator if what the question guards allows that."""
    whole_test, holder = cast("cst.CSTNode", node), facts.parent(node)
    while isinstance(holder, (cst.BooleanOperation, cst.UnaryOperation)):
        whole_test, holder = holder, facts.parent(holder)
    if isinstance(holder, (cst.If, cst.IfExp)) and holder.test is whole_test:
        if isinstance(holder, cst.IfExp) and _is_location(holder, facts):
            return Left(_LOADS, node.children, harmless=True)
        if (moves := _loads_to_cpu(holder, whole_test, facts)) is not None:
            return Left(_FLAG if moves else _LOADS, node.children, harmless=not moves)
        if isinstance(holder, cst.If) and loads_twice(holder, facts):
            loads = [call for call in find(holder, cst.Call) if facts.name(call.func) == "torch.load"]
            if not all(is_state(call, facts) for call in loads if argument(call, "map_location", 1) is None):
                return Left(_LOADS, node.children, harmless=True)
        if text_of(holder.body).endswith(("get_rank()", "get_world_size()")):
            return Left("an answer for a process group: ask torch.distributed.is_initialized()", node.children)
        if ASSERTED.search(facts.code) and _NAMES.search(text_of(holder.body)):
            return Left(NAMED, node.children)
        if isinstance(holder, cst.IfExp) and _takes_given_name(holder, facts):
            return Left(_ELSEWHERE, node.children)
        if "hidden" in facts.uses_of and _MOVES.search(text_of(holder.body)):
            return Left(HIDDEN, node.children)
        if facts.known.device_given and _MOVES.search(text_of(holder.body)):
            return Left(_CONFIGURED, node.children)
    if isinstance(facts.parent(node), cst.UnaryOperation) and any(map(_asks_for_other, _operands(whole_test))):
        return Left(_OTHER, node.children)
    if not all(map(facts.guards, facts.contexts)):
        return Left(_CONTEXT, node.children)
    if any(map(_picks_name, facts.parents(node))):
        return Left(LEFT, node.children)
    assign = next((outer for outer in facts.parents(node) if isinstance(outer, (cst.Assign, cst.BaseStatement))), None)
    around = list(facts.parents(node))
    flag = next((name for name, call in facts.options.items() if call in around), "")
    flag = text_of(assign.targets[0].target).split(".")[-1] if isinstance(assign, cst.Assign) else flag
    if facts.hides_all and isinstance(holder, cst.Assign) and whole_test is node:
        return Left(HIDDEN, node.children)
    flag = next(filter(None, map(key_of, around)), flag)
    if flag in flags_of_loads(facts.code):
        return Left(_FLAG, node.children)
    if flag in facts.known.asked:
        return Left(facts.known.asked[flag], node.children)
    if flag in facts.known.hiding - flags_that_hide(facts.code):
        return Left(HIDES, node.children)
    if is_given_away(whole_test, facts):
        return Left(GIVEN, node.children)
    if whole_test is node and isinstance(assign, cst.Assign) and holder is assign:
        name = text_of(assign.targets[0].target)
        asked = find(facts.module, cst.IfExp) if f"if {name} else" in facts.code else ()
        if any(text_of(each.test) == name and _takes_given_name(each, facts) for each in asked):
            return Left(_ELSEWHERE, node.children)
        asks = [each for each in find(facts.module, cst.If) if facts.known.device_given and text_of(each.test) == name]
        if any(_MOVES.search(text_of(each.body)) for each in asks):
            return Left(_CONFIGURED, node.children)
    return Left(LEFT, node.children, retry=whole(node, available(facts, node)), some=True)


def _loads_to_cpu(holder: cst.If | cst.IfExp, test: cst.CSTNode, facts: Facts) -> bool | None:
    """Return whether a question that loads to the CPU without CUDA also moves something; None if it is no such one.

    With CUDA it gives torch.load no place, so that another device could not load what CUDA has saved.
    """
    cpu, other = (holder.body, holder.orelse) if isinstance(test, cst.UnaryOperation) else (holder.orelse, holder.body)
    place = _AT_CPU.search(text_of(cpu)) if cpu is not None else None
    function = facts.function_of(holder)
    if place is None or "load(" in text_of(cpu or holder):
        return None
    if place["name"] is None and place["key"] is None:
        made = (
            [text_of(each.value) if each.value else "None" for each in find(function, cst.Return)] if function else []
        )
        return False if made and all(value == "None" or _CPU_NAME.fullmatch(value) for value in made) else None
    values = [text_of(value) for value in facts.assigned.get(place["name"] or "", [])]
    elsewhere = [value for value in values if not _AT_CPU.fullmatch(f"loc = {value}")]
    if not {"None", "{}"} & {*values} and any(_NAMES.search(value) or "lambda" in value for value in elsewhere):
        return None
    return other is not None and _MOVES.search(text_of(other)) is not None


def _picks_name(outer: cst.CSTNode) -> bool:
    """Return whether an answer picks a vendor's name, as in `["cpu", "cuda"][found]`, or skips a test's: it stays."""
    is_case = isinstance(outer, cst.Call) and text_of(outer.func).endswith("pytest.param")
    choices = outer.value if isinstance(outer, cst.Subscript) else outer if is_case else None
    return choices is not None and _NAMES.search(re.sub(r"\bdevice\([^()]*\)", "", text_of(choices))) is not None


def _takes_given_name(choice: cst.IfExp, facts: Facts) -> bool:
    """Return whether a choice is one between the CPU and a name that may be a vendor's, and is not rewritten with it.

    Without the vendor's device it is the CPU. On another accelerator the name would fail.
    """
    values = [_name_of(value, facts) for value in (choice.body, choice.orelse)]
    given = [value for value in values if text_of(value).strip("\"'") != "cpu"]
    name = given[0] if len(given) == 1 else choice
    looks_up = isinstance(name, cst.Call) and text_of(name.func).split(".")[-1] in _LOOKS_UP
    if not (looks_up or isinstance(name, (cst.Name, cst.Attribute, cst.Subscript))):
        return False
    if facts.is_whole(name) or facts.is_local_rank(name):
        return False
    option = facts.options.get(name.attr.value) if isinstance(name, cst.Attribute) else None
    if _NUMBER.search(text_of(name)) and not _is_text(name, option, facts):
        return False
    if option is not None:
        default, kind = argument(option, "default"), argument(option, "type")
        if kind is not None and text_of(kind) == "int":
            return False
        is_ported = default is not None and index_of(default)[0] and are_read_in(facts, option)
        is_ported = is_ported and is_device_name(text_of(name).split(".")[-1])
        return argument(option, "choices") is not None or not is_ported
    known = [value for value in facts.values(name) if value is not choice]
    is_ported = is_device_name(text_of(name)) and bool(known) and all(_is_device(value, facts) for value in known)
    return not is_ported or facts.is_given(text_of(name), name)


def _is_text(name: cst.BaseExpression, option: cst.Call | None, facts: Facts) -> bool:
    """Return whether what is called the number of a device is a text, by its option or by what is assigned to it."""
    given = [argument(option, "default")] if option is not None else facts.values(name)
    kind = argument(option, "type") if option is not None else None
    texts = (cst.SimpleString, cst.FormattedString)
    return (kind is not None and text_of(kind) == "str") or any(isinstance(each, texts) for each in given)


def _is_device(value: cst.BaseExpression, facts: Facts) -> bool:
    """Return whether a value is a device, or a choice of devices, that other rules rewrite and every host has."""
    if isinstance(value, cst.IfExp):
        return _is_device(value.body, facts) and _is_device(value.orelse, facts)
    name = _name_of(value, facts)
    named, index = index_of(name)
    return (named and not is_further(index)) or text_of(name).strip("\"'") == "cpu"


def _name_of(device: cst.BaseExpression, facts: Facts) -> cst.BaseExpression:
    """Return what `torch.device(...)` gets, or what is no such call itself."""
    is_made = isinstance(device, cst.Call) and facts.name(device.func) == "torch.device" and len(device.args) == 1
    return cst.ensure_type(device, cst.Call).args[0].value if is_made else device


def _operands(test: cst.CSTNode) -> list[cst.CSTNode]:
    if isinstance(test, cst.BooleanOperation):
        return _operands(test.left) + _operands(test.right)
    return [test]


def _asks_for_other(test: cst.CSTNode) -> bool:
    """Return whether a condition is true on another accelerator, as `torch.backends.mps.is_available()`."""
    return not isinstance(test, cst.UnaryOperation) and OTHERS.search(text_of(test)) is not None


def _is_location(choice: cst.IfExp, facts: Facts) -> bool:
    """Return whether a choice is a `map_location` that is none, for the device of what was saved, or the CPU's."""
    holder = facts.parent(choice)
    keyword = holder.keyword.value if isinstance(holder, cst.Arg) and holder.keyword else ""
    name = text_of(holder.targets[0].target) if isinstance(holder, cst.Assign) else keyword
    values = {text_of(choice.body), text_of(choice.orelse)}
    return name.endswith("map_location") and not values.isdisjoint({"None", "{}"})


def available(facts: Facts, node: cst.CSTNode) -> str:
    """Return the source of the question whether there is an accelerator, as a line asks for it."""
    if facts.level is not Level.TORCH:
        try:
            return f'{facts.place.kind(node)} != "cpu"'
        except UnplacedError:
            pass
    return f"{facts.torch}.accelerator.is_available()"


AVAILABILITY = Rule(
    "device check",
    "checks whether and how many devices there are",
    (cst.Call, cst.Attribute, cst.Name),
    _decide,
    (
        Example(
            Level.ROLES,
            "n = 4 if not torch.cuda.is_available else 0",
            "n = 4 if not torch.accelerator.is_available else 0",
        ),
        Example(Level.TORCH, "use_cuda = torch.cuda.is_available()", "use_cuda = torch.accelerator.is_available()"),
        Example(
            Level.ROLES,
            "use_cuda = not args.no_cuda and torch.cuda.is_available()",
            'use_cuda = not args.no_cuda and accel.device.type != "cpu"',
        ),
        Example(Level.ROLES, "cpu_only = not torch.cuda.is_available()", 'cpu_only = accel.device.type == "cpu"'),
        Example(
            Level.ROLES,
            "found = torch.cuda.is_available() is True",
            'found = (accel.device.type != "cpu") is True',
        ),
        Example(
            Level.ROLES,
            "n = torch.cuda.device_count()",
            "n = torch.get_device_module(torch.accelerator.current_accelerator()).device_count() "
            "if torch.accelerator.current_accelerator() else 0",
        ),
        Example(
            Level.ROLES,
            "batch_size *= torch.cuda.device_count()",
            "batch_size *= max(torch.get_device_module().device_count(), 1)",
        ),
        Example(
            Level.TORCH,
            "n = torch.cuda.device_count()\nbatch_size = 8 * n",
            "n = torch.get_device_module(torch.accelerator.current_accelerator()).device_count() "
            "if torch.accelerator.current_accelerator() else 0\nbatch_size = 8 * max(n, 1)",
        ),
        Example(
            Level.ROLES,
            "if torch.cuda.is_available():\n    kinds.append('cuda')",
            "# TODO(accelcore): a condition on one vendor's device: what it guards is left\n"
            "if torch.cuda.is_available():\n"
            "    # TODO(accelcore): a device's name in a place where it is not certain that it chooses a device\n"
            "    kinds.append('cuda')",
        ),
        Example(
            Level.ROLES,
            "print(torch.cuda.get_device_name(0))",
            'print(getattr(torch.get_device_module(accel.device), "get_device_name", lambda *_: accel.device.type)(0))',
        ),
    ),
)

"""Loading of data and of saved states: `pin_memory=True`, `map_location=lambda storage, loc: storage.cuda()`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from accelcore_lint.port.device_names import index_of
from accelcore_lint.port.device_sources import device_source, kind_source, location_source
from accelcore_lint.port.facts import Facts
from accelcore_lint.port.guards import last_of
from accelcore_lint.port.rule import Example, Left, Level, Rewrite, Rule
from accelcore_lint.port.rules.device_strings import AVAILABLE, whole
from accelcore_lint.port.syntax import argument, text_of
from accelcore_lint.port.vendors import DEVICES
from accelcore_lint.port.walk import find

_TABLE = 'map_location of one vendor\'s devices: a device, or "cpu", moves all that is loaded'
_TO_CPU = re.compile(
    r", *map_location *= *(?:torch\.device\([\"']cpu[\"']\)|[\"']cpu[\"']|lambda (\w+), *\w+: *\1(?:\.cpu\(\))?)(?=\))"
)
_PLACED = re.compile(r"\bload\([^\n]*\bmap_location *=")
_OF_MODEL = ("eval", "train", "modules", "parameters", "named_parameters")
"""Methods that a whole model has, and a state or a tensor has not."""

_NUMBER = re.compile(r"\[[\"'](\w*(epoch|iter|step)s?|iteration|arch)[\"']\]$")
_MOVES = re.compile(rf"\.({'|'.join(DEVICES)})\(")
_NAMING = (cst.SimpleString, cst.FormattedString, cst.BinaryOperation)
"""Expressions that may name a device with its index."""

_OF_DEVICE = re.compile(r"(?i)gpu|cuda|cpu|device|accelerator")
"""What a condition that divides devices names."""

_LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")


def _decide_pin(node: cst.Arg, facts: Facts) -> Rewrite | None:
    """Pin where that helps."""
    if node.keyword is None or node.keyword.value != "pin_memory":
        return None
    call = facts.parent(node)
    if not isinstance(call, cst.Call) or facts.name(call.func) not in _LOADERS:
        return None
    asks = isinstance(node.value, cst.Call) and facts.name(node.value.func) == AVAILABLE
    follows = call.args[call.args.index(node) + 1 :]
    if (text_of(node.value) != "True" and not asks) or any(arg.star == "*" for arg in follows):
        return None
    if facts.level is Level.TORCH or facts.place.is_apart(node):
        facts.place.check_question(node)
        if facts.is_library and "hides" in facts.uses_of:
            return None  # it may run before a script hides devices, and a question would make CUDA read the variable
        value = cst.parse_expression(f"{facts.torch}.accelerator.is_available()")
        return Rewrite(lambda updated: updated.with_changes(value=value), node.children, facts.needs_torch)
    value = cst.parse_expression(f"{facts.place.backend(node)}.loading()")
    starred = {"star": "**", "keyword": None, "equal": cst.MaybeSentinel.DEFAULT, "value": value}
    return Rewrite(lambda updated: updated.with_changes(**starred), node.children)


def _decide_load(node: cst.Call, facts: Facts) -> Rewrite | Left | None:
    """Name the device of what is loaded without one, where another branch names one for devices that are not CUDA's."""
    if facts.name(node.func) != "torch.load" or not node.args or any(arg.star for arg in node.args):
        return None
    path, *options = node.args
    if path.keyword is not None or any(arg.keyword is None for arg in options):
        return None
    if argument(node, "map_location") is not None:
        return None
    if not any(_PLACED.search(text_of(other)) for other in _other_branches(node, facts)):
        return None
    if not is_state(node, facts):
        if any(isinstance(outer, cst.If) and loads_twice(outer, facts) for outer in facts.parents(node)):
            return None
        return Left("torch.load without map_location only loads what was saved on a device that is here", inner=True)
    location = cst.Arg(
        cst.parse_expression(facts.place.device(node)),
        cst.Name("map_location"),
        equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
    )
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))

    def build(updated: cst.Call) -> cst.Call:
        *args, last = updated.args
        return updated.with_changes(args=[*args, last.with_changes(comma=comma), location])

    return Rewrite(build)


def loads_twice(guard: cst.If, facts: Facts) -> bool:
    """Return whether an `if` only loads something: to where CUDA saved it, or, where there is none, to the CPU.

    If it is no state, its question stays: other devices then take from the CPU what is loaded, as before.
    """
    bodies = [text_of(each.body).strip() for each in (guard, guard.orelse) if isinstance(each, (cst.If, cst.Else))]
    loads = [call for call in find(guard, cst.Call) if facts.name(call.func) == "torch.load"]
    if len(bodies) != 2 or len(loads) != 2 or any("\n" in body for body in bodies):
        return False
    one, other = (_TO_CPU.sub("", body) for body in bodies)
    names_cpu = [bool(_TO_CPU.search(body)) for body in bodies]
    return one == other and names_cpu.count(True) == 1


def is_state(load: cst.Call, facts: Facts) -> bool:
    """Return whether all that is done with what is loaded is a `load_state_dict`, or what is done with a model.

    Also by a name, and beside the numbers of a checkpoint, which no device has.
    """
    holder = facts.parent(load)
    if isinstance(holder, cst.Subscript) and holder.value is load:  # torch.load(path)["model"]
        holder = facts.parent(holder)
    if not isinstance(holder, cst.Assign):
        return isinstance(holder, cst.Arg) and _is_restored(holder, facts)
    name, scope = text_of(holder.targets[0].target), facts.function_of(load) or facts.module
    if len(holder.targets) != 1 or not name.isidentifier():
        return False
    holders = [(each, facts.parent(each)) for each in find(scope, cst.Name) if each.value == name]
    uses = (use for each, use in holders if getattr(use, "attr", None) is not each)  # not as in `self.name`
    read = [use for use in uses if not isinstance(use, cst.AssignTarget)]
    if any(isinstance(use, cst.Attribute) and use.attr.value in _OF_MODEL for use in read):
        # A model that the CPU has saved may be for the CPU, unless it is moved after it, or something is to CUDA.
        is_moved = re.search(rf"\b{name}\.to\(", text_of(scope).partition(text_of(load))[2]) is not None
        is_moved = is_moved or _MOVES.search(text_of(scope)) is not None
        return is_moved and not any(isinstance(use, cst.Subscript) for use in read)
    read = [use for use in read if not (isinstance(use, cst.Subscript) and _NUMBER.search(text_of(use)))]
    read = [use for use in read if not _reads_keys(use, facts)]
    parts = (facts.parent(use) if isinstance(use, cst.Subscript) else use for use in read)
    return bool(read) and all(isinstance(use, cst.Arg) and _is_restored(use, facts) for use in parts)


def _reads_keys(use: cst.CSTNode | None, facts: Facts) -> bool:
    """Return whether a state is only read by its keys, as to rename them: `for key, value in state.items():`."""
    if isinstance(use, cst.Attribute):  # an array of NumPy needs a tensor on the CPU
        is_array = ".numpy(" in text_of(facts.function_of(use) or facts.module)
        return use.attr.value == "keys" or (use.attr.value == "items" and not is_array)
    call = facts.parent(use) if isinstance(use, cst.Arg) else None
    return isinstance(use, cst.For | cst.CompFor) or (isinstance(call, cst.Call) and text_of(call.func) == "iter")


def _is_restored(arg: cst.Arg, facts: Facts) -> bool:
    call = facts.parent(arg)
    return isinstance(call, cst.Call) and text_of(call.func).endswith(".load_state_dict")


def _other_branches(node: cst.CSTNode, facts: Facts) -> Iterator[cst.CSTNode]:
    """Yield what runs instead of a node on other devices, in the branches of each `if` and of each choice around it.

    If an `if` asks for a device and returns, the rest of its block is such a branch, too.
    """
    inner = node
    for outer in facts.parents(node):
        divided = outer if isinstance(outer, (cst.If, cst.IfExp)) and _OF_DEVICE.search(text_of(outer.test)) else None
        if divided is not None and divided.orelse is not None and inner is not divided.test:
            yield divided.orelse if inner is divided.body else divided.body
        lines = [*outer.body] if isinstance(outer, (cst.IndentedBlock, cst.Module)) else []
        for number, line in enumerate(lines):
            if isinstance(line, cst.If) and isinstance(last_of(line), cst.Return) and AVAILABLE in text_of(line.test):
                yield from lines[number + 1 :] if line is inner else [line.body] if inner in lines[number:] else ()
        if isinstance(outer, cst.FunctionDef):
            return
        inner = outer


def _decide_map(node: cst.Lambda | cst.Dict, facts: Facts) -> Rewrite | Left | None:
    """Replace `lambda storage, loc: storage.cuda(0)`, which moves all that is loaded to a device, and tables."""
    if not _is_map(node, facts):
        return None
    decision = _decide_table(node, facts) if isinstance(node, cst.Dict) else _decide_function(node, facts)
    moves = any(each.attr.value in DEVICES for each in find(node, cst.Attribute))
    if decision is None and (moves or any(index_of(each)[0] for kind in _NAMING for each in find(node, kind))):
        return Left(_TABLE, node.children)
    return decision


def _is_map(node: cst.CSTNode, facts: Facts) -> bool:
    """Return whether an expression is, or may be, the `map_location` of `torch.load`, or is assigned to such a name."""
    while isinstance(holder := facts.parent(node), cst.IfExp) and holder.test is not node:
        node = holder
    if isinstance(holder, cst.Assign):
        return text_of(holder.targets[0].target) in ("map_location", "loc")
    call = facts.parent(holder) if isinstance(holder, cst.Arg) else None
    if not isinstance(call, cst.Call):
        return False
    return argument(call, "map_location") is node or (
        facts.name(call.func) == "torch.load" and argument(call, "map_location", 1) is node
    )


def _decide_function(node: cst.Lambda, facts: Facts) -> Rewrite | Left | None:
    body, params = node.body, node.params.params
    if (
        len(params) != 2
        or not isinstance(body, cst.Call)
        or not isinstance(body.func, cst.Attribute)
        or body.func.attr.value not in DEVICES
        or text_of(body.func.value) != params[0].name.value
        or len(body.args) > 1
    ):
        return None
    index = argument(body, "device", 0)
    made = facts.values_at(index) if index is not None else []
    if len(made) == 1 and facts.is_current(made[0]):  # the number of the current device, by a name
        index = None
    if index is None or not (facts.is_library or (facts.level is Level.TORCH and text_of(index) != "0")):
        source = device_source(facts, node, index)
    elif facts.is_whole(index) or facts.is_local_rank(index):
        source = location_source(facts, node, index)
    else:
        source = Left(f"map_location of the index {text_of(index)}, which may be no number: give it the model's device")
    return source if isinstance(source, Left) else whole(node, source)


def _decide_table(node: cst.Dict, facts: Facts) -> Rewrite | None:
    """Replace `{"cuda:0": f"cuda:{rank}"}`, which moves what the first device has saved, and `{"cuda:0": "cpu"}`."""
    pairs = [each for each in node.elements if isinstance(each, cst.DictElement) and index_of(each.key)[0]]
    if not pairs or len(pairs) != len(node.elements):
        return None
    if all(text_of(pair.value).strip("\"'") == "cpu" for pair in pairs):
        return whole(node, '"cpu"')
    first, (to_device, index) = index_of(pairs[0].key)[1], index_of(pairs[0].value)
    if len(pairs) != 1 or not to_device or first is None or text_of(first) != "0":
        return None
    to = kind_source(facts, node, index)
    if isinstance(to, Left):
        return None
    return whole(node, f'{{f"{{{facts.place.kind(node)}}}:0": {to}}}')


PINS = Rule(
    "pinned memory",
    "`pin_memory=True` of a DataLoader",
    (cst.Arg,),
    _decide_pin,
    (
        Example(
            Level.TORCH,
            "loader = torch.utils.data.DataLoader(data, 8, pin_memory=True)",
            "loader = torch.utils.data.DataLoader(data, 8, pin_memory=torch.accelerator.is_available())",
        ),
        Example(
            Level.ROLES,
            "loader = torch.utils.data.DataLoader(data, 8, pin_memory=True)",
            "loader = torch.utils.data.DataLoader(data, 8, **accel.loading())",
        ),
    ),
    optional=True,
)

LOADS = Rule(
    "load",
    "`torch.load` without `map_location`, where another branch gives one",
    (cst.Call,),
    _decide_load,
    (
        Example(
            Level.ROLES,
            "if torch.cuda.is_available():\n    net.load_state_dict(torch.load(path))\n    net.cuda()\n"
            "else:\n    net.load_state_dict(torch.load(path, map_location='cpu'))",
            'if accel.device.type != "cpu":\n    net.load_state_dict(torch.load(path, map_location=accel.device))\n'
            "    net.to(accel.device)\nelse:\n    net.load_state_dict(torch.load(path, map_location='cpu'))",
        ),
    ),
)

MAPS = Rule(
    "map_location",
    "functions and tables that move what is loaded",
    (cst.Lambda, cst.Dict),
    _decide_map,
    (
        Example(
            Level.ROLES,
            'state = torch.load(path, map_location={"cuda:0": f"cuda:{local_rank}"})',
            'state = torch.load(path, map_location={f"{accel.device.type}:0": str(accel.device)})',
        ),
        Example(
            Level.ROLES,
            "state = torch.load(path, map_location=lambda storage, loc: storage.cuda())",
            "state = torch.load(path, map_location=accel.device)",
        ),
        Example(
            Level.TORCH,
            "state = torch.load(path, map_location=lambda storage, loc: storage.cuda(local_rank))",
            'state = torch.load(path, map_location=f"{device.type}:{local_rank}" if device.type != "cpu" else "cpu")',
        ),
        Example(Level.ROLES, 'state = torch.load(path, {"cuda:0": "cpu"})', 'state = torch.load(path, "cpu")'),
        Example(
            Level.ROLES,
            'state = torch.load(path, map_location={"cuda:1": "cuda:0"})',
            f'# TODO(accelcore): {_TABLE}\nstate = torch.load(path, map_location={{"cuda:1": "cuda:0"}})',
        ),
    ),
)

"""Events, streams, properties of devices, and forks of random numbers, which all accelerators have."""

from __future__ import annotations

import re

import libcst as cst

from accelcore_lint.port.facts import Facts
from accelcore_lint.port.rule import Example, Level, Rewrite, Rule
from accelcore_lint.port.rules.device_strings import whole
from accelcore_lint.port.syntax import argument, text_of
from accelcore_lint.port.walk import find

_SHARED = r"\.(?:name|total_memory)\b"
"""Properties that a device of each vendor has."""

_STREAMS = ("Stream", "stream", "current_stream")
"""Functions for streams that the module of each accelerator has, and that of the CPU, which has one stream."""

_VENDORS_STREAMS = re.compile(
    r"\b(?:ExternalStream|default_stream|CUDAGraph|cupy|numba|pycuda|tensorrt)\b|\.cuda\.graph\b"
)
"""What a file does with streams that only one vendor's devices do."""


def _decide(node: cst.Call, facts: Facts) -> Rewrite | None:
    name = facts.name(node.func)
    if name == "torch.random.fork_rng":
        return _decide_fork(node, facts)
    if name == "torch.cuda.Event" and _may_be_plain(facts):
        func = f"{facts.torch}.Event"
    elif name == "torch.cuda.get_device_properties" and _asks_shared(node, facts):
        func = f"{facts.torch}.get_device_module().get_device_properties"
    elif name in {f"torch.cuda.{each}" for each in _STREAMS} and not _has_vendors_streams(facts):
        facts.place.check_question(node)
        func = f"{facts.torch}.get_device_module().{(name or '').rpartition('.')[2]}"
    else:
        return None
    if any(isinstance(outer, cst.Try) for outer in facts.parents(node)):
        return None  # its handler may expect CUDA's error
    made = cst.parse_expression(func)
    return Rewrite(lambda updated: updated.with_changes(func=made), [node.func], facts.needs_torch)


def _may_be_plain(facts: Facts) -> bool:
    """Return whether all events of a file only take times, and may be those of the accelerator, as `torch.Event` makes.

    Torch takes the time between two events of one class only.
    """
    made = [call for call in facts.calls if facts.name(call.func) == "torch.cuda.Event"]
    on_import = facts.is_library and any(facts.function_of(call) is None for call in made)
    asks_early = facts.hidden_by or facts.forks or facts.known.forks or on_import
    in_try = any(isinstance(outer, cst.Try) for call in made for outer in facts.parents(call))
    if asks_early or in_try or "event" in facts.uses_of:
        return False
    return all(_needs_accelerator(call, facts) for call in made)


def _needs_accelerator(event: cst.Call, facts: Facts) -> bool:
    """Return whether an event is only made, or only used, where there is an accelerator: the CPU records none."""
    if facts.guards(event):
        return True
    line = facts.parent(event)
    target = line.targets[0].target if isinstance(line, cst.Assign) and len(line.targets) == 1 else None
    if not isinstance(target, cst.Name):
        return False
    names = [name for name in find(facts.module, cst.Name) if name.value == target.value]
    uses = [name for name in names if not isinstance(facts.parent(name), cst.AssignTarget)]
    return all(map(facts.guards, uses))


def _has_vendors_streams(facts: Facts) -> bool:
    """Return whether a file uses streams as only one vendor's can be, or the project reads the address of one."""
    return "stream" in facts.uses_of or _VENDORS_STREAMS.search(facts.code) is not None


def _asks_shared(node: cst.Call, facts: Facts) -> bool:
    """Return whether the properties of a device are only asked for what devices of all vendors have.

    They may also be those of several devices in a list, as in `devices[i].name`.
    """
    holder = facts.parent(node)
    if isinstance(holder, cst.Attribute):
        return re.fullmatch(_SHARED, f".{holder.attr.value}") is not None
    is_list = isinstance(holder, cst.ListComp) and holder.elt is node
    holder, shared = (facts.parent(holder), rf"\[\w+\]{_SHARED}") if is_list and holder else (holder, _SHARED)
    target = holder.targets[0].target if isinstance(holder, cst.Assign) and len(holder.targets) == 1 else None
    function = facts.function_of(node)
    if not isinstance(target, cst.Name) or function is None:
        return False
    uses = rf"(?<![\w.]){target.value}\b(?!=[^=])"
    found = len(re.findall(uses, text_of(function)))
    return found > 1 and found == len(re.findall(f"{uses}{shared}", text_of(function))) + 1


def _decide_fork(node: cst.Call, facts: Facts) -> Rewrite | None:
    """Fork the random numbers of the current device, whose type `fork_rng` has to get; the CPU's are always forked."""
    devices = argument(node, "devices") if len(node.args) == 1 else None
    index = devices.elements[0].value if isinstance(devices, cst.List) and len(devices.elements) == 1 else None
    if not isinstance(index, cst.Call) or facts.name(index.func) != "torch.cuda.current_device":
        return None
    kind = facts.place.kind(node)
    current = f'[{facts.torch}.accelerator.current_device_index()] if {kind} != "cpu" else []'
    return whole(node, f"{text_of(node.func)}(devices={current}, device_type={kind})", facts.needs_torch)


MODULES = Rule(
    "device's module",
    "events, streams, the names and the memory of devices, and forks of their random numbers",
    (cst.Call,),
    _decide,
    (
        Example(
            Level.ROLES,
            "if torch.cuda.is_available():\n    start = torch.cuda.Event(enable_timing=True)",
            'if accel.device.type != "cpu":\n    start = torch.Event(enable_timing=True)',
        ),
        Example(
            Level.ROLES,
            "with torch.cuda.stream(side):\n    side.wait_stream(torch.cuda.current_stream())",
            "with torch.get_device_module().stream(side):\n"
            "    side.wait_stream(torch.get_device_module().current_stream())",
        ),
        Example(
            Level.TORCH,
            "total = torch.cuda.get_device_properties(0).total_memory",
            "total = torch.get_device_module().get_device_properties(0).total_memory",
        ),
        Example(
            Level.ROLES,
            "with torch.random.fork_rng(devices=[torch.cuda.current_device()]):\n    train()",
            "with torch.random.fork_rng(devices=[torch.accelerator.current_device_index()] "
            'if accel.device.type != "cpu" else [], device_type=accel.device.type):\n    train()',
        ),
    ),
)

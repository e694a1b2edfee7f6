"""Memory figures of the device."""

from __future__ import annotations

import re

import libcst as cst

from accelcore_lint.port.device_names import is_device_name
from accelcore_lint.port.facts import Facts
from accelcore_lint.port.rule import Example, Left, Level, Rewrite, Rule
from accelcore_lint.port.rules.device_strings import whole
from accelcore_lint.port.syntax import argument, text_of

_FIGURES = {"max_memory_allocated": "peak", "memory_allocated": "used"}
_KNOWN = re.compile(r"torch\.cuda(?:\.memory)?\.((?:max_)?memory_)(allocated|reserved|cached|stats)")


def _decide(node: cst.Call, facts: Facts) -> Rewrite | Left | None:
    found = _KNOWN.fullmatch(facts.name(node.func) or "")
    if found is None:
        return None
    name = found[1] + found[2].replace("cached", "reserved")
    device = argument(node, "device", 0)
    first = device is not None and text_of(device) == "0"
    own = device is None or facts.is_local_rank(device) or facts.sets_device(device, node)
    own = own or (first and facts.is_own(device))
    named = "" if device is None or own or not is_device_name(text_of(device)) else text_of(device)
    named = "0" if first and not own else named  # the process may have another one
    index = text_of(device) if device is not None and text_of(device).endswith(".index") else ""
    named = index if is_device_name(index.removesuffix(".index")) else named
    if len(node.args) > 1 or not (own or named):
        return Left(f"{name} of a device of its own")
    resets = any(attribute.startswith("reset_") and "memory" in attribute for attribute in facts.attributes)
    if own and facts.level is not Level.TORCH and name in _FIGURES and not resets and facts.place.can_choose(node):
        return whole(node, f"{facts.place.backend(node)}.runtime.memory().{_FIGURES[name]}")
    # The CPU's module has no figures, nor has that of MPS.
    none = f"lambda{' _' if named else ''}: {'{}' if name == 'memory_stats' else 0}"
    # The module is the accelerator's own: a device that is None stands for its current one.
    source = f'getattr({facts.torch}.get_device_module(), "{name}", {none})({named})'
    return whole(node, source, facts.needs_torch)


MEMORY = Rule(
    "memory",
    "memory in use, and its peak",
    (cst.Call,),
    _decide,
    (
        Example(
            Level.TORCH,
            "peak = torch.cuda.max_memory_allocated()",
            'peak = getattr(torch.get_device_module(), "max_memory_allocated", lambda: 0)()',
        ),
        Example(
            Level.ROLES,
            "used = torch.cuda.memory_allocated(device=args.device.index)",
            'used = getattr(torch.get_device_module(), "memory_allocated", lambda _: 0)(args.device.index)',
        ),
        Example(
            Level.ROLES,
            "figures = torch.cuda.memory_stats(device)",
            'figures = getattr(torch.get_device_module(), "memory_stats", lambda _: {})(device)',
        ),
        Example(Level.ROLES, "peak = torch.cuda.max_memory_allocated()", "peak = accel.runtime.memory().peak"),
    ),
)

"""Loss scalers: `torch.cuda.amp.GradScaler`."""

from __future__ import annotations

import math
import re

import libcst as cst

from accelcore_lint.port.device_names import index_of, is_device_name
from accelcore_lint.port.facts import Facts
from accelcore_lint.port.rule import Example, Left, Level, Rewrite, Rule
from accelcore_lint.port.rules.amp import both, is_on
from accelcore_lint.port.syntax import arguments, text_of

OF_DEVICE = {"torch.cuda.amp.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler"}
"""The class of one vendor's device."""

_GENERIC = ("torch.amp.GradScaler", "torch.GradScaler")
_SETTINGS = {
    "init_scale": "init",
    "growth_factor": "growth",
    "backoff_factor": "backoff",
    "growth_interval": "interval",
}
_ONLY_TORCHS = {
    "get_growth_factor", "get_backoff_factor", "get_growth_interval", "set_growth_factor", "set_backoff_factor",
    "set_growth_interval", "_scale", "_enabled", "_per_optimizer_states", "_check_inf_per_device",
}  # fmt: skip
_STRANGE = re.compile(r"(Native|Grad|Loss|Amp|Sharded)\w*Scaler\w*", re.IGNORECASE)


def _decide(node: cst.Call, facts: Facts) -> Rewrite | Left | None:
    name = facts.name(node.func)
    if name is not None and _is_strange(name, facts):
        return Left(
            "a loss scaler of another package, which may be one vendor's: then it does nothing elsewhere", inner=True
        )
    if any(arg.star == "**" for arg in node.args):
        return None
    names = (*_SETTINGS, "enabled")
    if name in OF_DEVICE:
        given = arguments(node, *names)
    elif name in _GENERIC:
        given = arguments(node, "device", *names)
        if given is not None and "device" in given and not index_of(given.pop("device").value)[0]:
            return None
    else:
        return None
    if given is None:
        return Left("arguments of GradScaler that are not known")
    keeps = {key: node.args.index(arg) for key, arg in given.items()}
    chosen = any(map(is_device_name, facts.options))  # by the user, perhaps as "cuda:1"
    stays = facts.attributes & _ONLY_TORCHS or "scaler" in facts.uses_of or chosen
    test = _only_where(node, facts)
    enabled = text_of(given["enabled"].value) if "enabled" in given else "True"
    on = both(test, enabled) if test else enabled
    stays = stays or (on != "True" and _loads_off(on, facts))
    stays = stays or ("init_scale" in given and not _is_within(text_of(given["init_scale"].value)))
    with_backend = facts.place.can_choose(node) and not stays
    prefix = facts.place.backend(node) if with_backend else facts.place.kind(node)

    def build(updated: cst.Call) -> cst.BaseExpression:
        values = {key: text_of(updated.args[position].value) for key, position in keeps.items()}
        if test and test not in values.get("enabled", ""):
            values["enabled"] = both(test, values.get("enabled", "True"))
        if not with_backend:
            parts = ", ".join([prefix, *(f"{key}={text}" for key, text in values.items())])
            return cst.parse_expression(f"{facts.torch}.amp.GradScaler({parts})")
        enabled = values.pop("enabled", "True")
        made = f"{prefix}.scaler.create({', '.join(f'{_SETTINGS[key]}={text}' for key, text in values.items())})"
        if enabled == "True":
            return cst.parse_expression(made)
        if enabled == "False":
            return cst.parse_expression(f"{prefix}.scaler.none()")
        choice = f"{made} if {enabled} else {prefix}.scaler.none()"
        return cst.parse_expression(choice if isinstance(facts.parent(node), cst.Assign) else f"({choice})")

    gone = [node.func, *(arg for arg in node.args if arg not in given.values())]
    return Rewrite(build, claims=gone, imports=() if with_backend else facts.needs_torch)


def _only_where(node: cst.Call, facts: Facts) -> str:
    """Return the condition of a scaler that is off on the CPU, as CUDA's is; "" if it may be on.

    It may be on beside `accel.autocast`, which works on the CPU, unless the script reads gradients that it has scaled.
    It has to be on where the project takes an entry of its state: that of a scaler which is off is empty.
    """
    if "scale" in facts.uses_of:
        return ""
    alone = facts.level is Level.TORCH or not facts.place.can_choose(node)
    if facts.guards(node) or not (alone or "scaled" in facts.uses_of):
        return ""
    return is_on(facts, facts.place.kind(node))


def _loads_off(on: str, facts: Facts) -> bool:
    """Return whether a line loads a state also if the scaler is off: torch's ignores it, and accelcore's refuses it."""
    words = {"is_enabled", *re.findall(r"\w+(?![\w.])", on)} - {"not", "and", "or", "True", "False", "None"}
    return any(words.isdisjoint(above) for above in facts.scaler_loads)


def _is_within(scale: str) -> bool:
    """Return whether a scale in figures, such as `2.0**16`, is in the bounds that accelcore's scalers have."""
    base, _, power = scale.partition("**")
    try:
        return 1 <= math.pow(float(base), float(power or 1)) <= 2**24
    except (ValueError, OverflowError):
        return False


def _is_strange(name: str, facts: Facts) -> bool:
    """Return whether a function makes a scaler that another package brings, in a file with a vendor's autocast."""
    module, _, made = name.rpartition(".")
    first = module.split(".")[0]
    is_own = not first or first in ("accelcore", "apex") or first in facts.known.modules
    known = name in OF_DEVICE or name in _GENERIC or is_own
    return not known and _STRANGE.fullmatch(made) is not None and "autocast" in facts.code


SCALER = Rule(
    "scaler",
    "the loss scaler of a vendor's device",
    (cst.Call,),
    _decide,
    (
        Example(
            Level.TORCH,
            "scaler = torch.cuda.amp.GradScaler()",
            'scaler = torch.amp.GradScaler(device.type, enabled=device.type != "cpu")',
        ),
        Example(
            Level.ROLES,
            "scaler = torch.cuda.amp.GradScaler(init_scale=1024.0, enabled=args.amp)",
            "scaler = accel.scaler.create(init=1024.0) if args.amp else accel.scaler.none()",
        ),
    ),
)

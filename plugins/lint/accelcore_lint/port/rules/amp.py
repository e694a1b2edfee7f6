"""Mixed precision: autocast, `custom_fwd` and `custom_bwd`."""

from __future__ import annotations

import re

import libcst as cst

from accelcore_lint.port.device_names import index_of
from accelcore_lint.port.facts import Facts
from accelcore_lint.port.rule import Example, Left, Level, Rewrite, Rule
from accelcore_lint.port.syntax import argument, arguments, text_of
from accelcore_lint.port.vendors import DEVICES

_OF_DEVICE = {"torch.cuda.amp.autocast", "torch.cuda.amp.autocast_mode.autocast"}
_GENERIC = {"torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast"}
_CUSTOM = {
    f"torch.cuda.amp.{module}{name}": name for module in ("", "autocast_mode.") for name in ("custom_fwd", "custom_bwd")
}

_SCALER = re.compile(r"torch\.(?:\w+\.)*GradScaler")
_OF_TYPE = re.compile(rf"== *[\"'](?:{'|'.join(DEVICES)})[\"']")

_OTHER_DTYPE = "a file of the project sets autocast's default type for one device: give the type by dtype= here"
_MADE_ONCE = "an autocast that is made before the CPU's own may be turned on: make and enter it in a `with` statement"


def _decide_autocast(node: cst.Call, facts: Facts) -> Rewrite | Left | None:
    name = facts.name(node.func)
    if name in _OF_DEVICE:
        given = arguments(node, "enabled", "dtype", "cache_enabled")
    elif name in _GENERIC:
        given = arguments(node, "device_type", "dtype", "enabled", "cache_enabled")
        if given is not None and ("device_type" not in given or not index_of(given.pop("device_type").value)[0]):
            return None
    else:
        return None
    if given is None:
        return Left("arguments of autocast that are not known")
    is_off = "enabled" in given and text_of(given["enabled"].value) == "False"
    if "dtype" not in given and "dtype" in facts.uses_of and not is_off:
        return Left(_OTHER_DTYPE)
    keeps = {key: node.args.index(arg) for key, arg in given.items()}
    can_choose = facts.place.can_choose(node)
    unscaled = can_choose and _lacks_scale_on_cpu(facts)
    with_backend = can_choose and "cache_enabled" not in given and not (unscaled and "autocast" in facts.uses_of)
    # torch.compile knows torch's own only, and a module that keeps one may be copied.
    with_backend = with_backend and "fullgraph=True" not in facts.code and not _is_attribute(node, facts)
    test = ""
    beside_cpu = "autocast" in facts.uses_of  # CUDA's leaves autocast on the CPU as it is
    is_decorator = isinstance(facts.parent(node), cst.Decorator)
    if not with_backend and _is_attribute(node, facts) and beside_cpu and not facts.guards(node):
        return Left(_MADE_ONCE)
    if with_backend:
        func = f"{facts.place.backend(node)}.autocast"
        first = []
        if unscaled and not (facts.guards(node) or ("enabled" in given and facts.implies(given["enabled"].value))):
            test = is_on(facts, facts.place.kind(node))
    else:
        func = f"{facts.torch}.autocast"
        first = [facts.place.kind(node)]
        test = "" if facts.guards(node) else is_on(facts, first[0])

    def build(updated: cst.Call) -> cst.BaseExpression:
        values = {key: text_of(updated.args[position].value) for key, position in keeps.items()}
        # A vendor's autocast means float16; other devices' own may have another default.
        dtype = values.pop("dtype", f"{facts.torch}.float16")
        if test and beside_cpu and not is_decorator:
            enabled = values.pop("enabled", "True")
            values["enabled"] = _beside_cpu(test, enabled, f'{facts.torch}.is_autocast_enabled("cpu")')
            dtype = f"{dtype} if {test} else None" if enabled != "False" else ""
        elif test and not beside_cpu:
            values["enabled"] = both(test, values.pop("enabled", "True"))
        parts = [
            *first,
            *([dtype if with_backend else f"dtype={dtype}"] if dtype else []),
            *(f"{key}={text}" for key, text in values.items()),
        ]
        made = f"{func}({', '.join(parts)})"
        if test and beside_cpu and is_decorator:  # it is made before the CPU's own may be turned on
            made = f"{made} if {test} else lambda function: function"
        return cst.parse_expression(made).with_changes(lpar=updated.lpar, rpar=updated.rpar)

    gone = [node.func, *(arg for arg in node.args if arg not in given.values())]
    return Rewrite(build, claims=gone, imports=facts.needs_torch)


def _lacks_scale_on_cpu(facts: Facts) -> bool:
    """Return whether a scaler of the script is off on the CPU: autocast there would compute in float16 without one.

    A scaler that an imported module makes is: the module has no backend.
    """
    scalers = [call for call in facts.calls if _SCALER.fullmatch(facts.name(call.func) or "")]
    tests = [test for call in scalers if (test := argument(call, "enabled")) is not None]
    return (
        "scaled" in facts.uses_of
        or (not scalers and "scaled_below" in facts.uses_of)
        or any(facts.guards(call) or not facts.place.can_choose(call) for call in scalers)
        or any(facts.implies(test) or _OF_TYPE.search(text_of(test)) for test in tests)
    )


def _is_attribute(node: cst.Call, facts: Facts) -> bool:
    holder = facts.parent(node)
    return isinstance(holder, cst.Assign) and isinstance(holder.targets[0].target, cst.Attribute)


def is_on(facts: Facts, kind: str) -> str:
    """Return the condition of an autocast that does nothing on the CPU, as a vendor's does."""
    plain = kind.removesuffix(".type").replace(".", "").isidentifier()
    return f'{kind} != "cpu"' if plain else f"{facts.torch}.accelerator.current_accelerator() is not None"


def both(test: str, enabled: str) -> str:
    """Return the source of two conditions at once."""
    if enabled in ("True", "False"):
        return test if enabled == "True" else "False"
    plain = isinstance(
        cst.parse_expression(enabled), (cst.Name, cst.Attribute, cst.Call, cst.Comparison, cst.Subscript)
    )
    return f"{test} and {enabled if plain else f'({enabled})'}"


def _beside_cpu(test: str, enabled: str, on_cpu: str) -> str:
    """Return the source of a condition for the accelerator, beside another one for the CPU."""
    if enabled == "True":
        return f"{test} or {on_cpu}"
    if enabled == "False":
        is_off = test.replace("!=", "==").replace("is not", "is")
        return f"{is_off} and {on_cpu}"
    return f"{enabled} if {test} else {on_cpu}"


def _decide_custom(node: cst.Decorator, facts: Facts) -> Rewrite | Left | None:
    call = node.decorator
    name = _CUSTOM.get(facts.name(call.func if isinstance(call, cst.Call) else call) or "")
    if name is None:
        return None
    given = arguments(call, "cast_inputs") if isinstance(call, cst.Call) else {}
    if given is None:
        return Left(f"arguments of {name} that are not known")
    parts = [f"device_type={facts.place.kind(node)}", *(f"{key}={text_of(arg.value)}" for key, arg in given.items())]
    made = cst.parse_expression(f"{facts.torch}.amp.{name}({', '.join(parts)})")
    return Rewrite(lambda updated: updated.with_changes(decorator=made), claims=[call], imports=facts.needs_torch)


AUTOCAST = Rule(
    "autocast",
    "autocast of a vendor's device",
    (cst.Call,),
    _decide_autocast,
    (
        Example(
            Level.TORCH,
            "with torch.cuda.amp.autocast():\n    loss = model(x)",
            'with torch.autocast(device.type, dtype=torch.float16, enabled=device.type != "cpu"):\n    loss = model(x)',
        ),
        Example(
            Level.ROLES,
            'with torch.autocast("cuda", torch.bfloat16, enabled=args.amp):\n    loss = model(x)',
            "with accel.autocast(torch.bfloat16, enabled=args.amp):\n    loss = model(x)",
        ),
    ),
)

CUSTOM = Rule(
    "custom function",
    "`custom_fwd` and `custom_bwd` of a vendor's device",
    (cst.Decorator,),
    _decide_custom,
    (
        Example(
            Level.TORCH,
            "@torch.cuda.amp.custom_fwd(cast_inputs=torch.float32)\ndef forward(ctx, x):\n    return x",
            '@torch.amp.custom_fwd(device_type=(torch.accelerator.current_accelerator() or torch.device("cpu")).type, '
            "cast_inputs=torch.float32)\ndef forward(ctx, x):\n    return x",
        ),
    ),
)

"""Loading of data and of saved states: `pin_memory=True`, `map_location=lambda storage, loc: storage.cuda()`."""

from __future__ import annotations

import libcst as cst

from accelcore_lint.port.facts import Facts
from accelcore_lint.port.indexes import index_of
from accelcore_lint.port.model import Example, Left, Level, Rewrite, Rule
from accelcore_lint.port.rules.device_strings import AVAILABLE, device_source, kind_source, whole
from accelcore_lint.port.tree import argument, text_of
from accelcore_lint.port.vendors import DEVICES

_LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")


def _decide_pin(node: cst.Arg, facts: Facts) -> Rewrite | None:
    """Pin where that helps."""
    if node.keyword is None or node.keyword.value != "pin_memory":
        return None
    call = facts.parent(node)
    if not isinstance(call, cst.Call) or facts.name(call.func) not in _LOADERS:
        return None
    asks = isinstance(node.value, cst.Call) and facts.name(node.value.func) in AVAILABLE
    follows = call.args[call.args.index(node) + 1 :]
    if (text_of(node.value) != "True" and not asks) or any(arg.star == "*" for arg in follows):
        return None
    if facts.level is Level.TORCH or facts.place.is_apart(node):
        value = cst.parse_expression(f"{facts.torch}.accelerator.is_available()")
        return Rewrite(lambda updated: updated.with_changes(value=value), node.children, facts.needs_torch)
    value = cst.parse_expression(f"{facts.place.backend(node)}.loading()")
    starred = {"star": "**", "keyword": None, "equal": cst.MaybeSentinel.DEFAULT, "value": value}
    return Rewrite(lambda updated: updated.with_changes(**starred), node.children)


def _decide_map(node: cst.Lambda | cst.Dict, facts: Facts) -> Rewrite | Left | None:
    """Replace `lambda storage, loc: storage.cuda(0)`, which moves all that is loaded to a device."""
    arg = facts.parent(node)
    holder = arg.keyword if isinstance(arg, cst.Arg) else arg.targets[0].target if isinstance(arg, cst.Assign) else None
    if holder is None or text_of(holder) not in ("map_location", "loc"):
        return None
    if isinstance(node, cst.Dict):
        return _decide_dict(node, facts)
    if not isinstance(arg, cst.Arg):
        return None
    body = node.body
    params = node.params.params
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
    if index is not None and (facts.is_library or (facts.level is Level.TORCH and text_of(index) != "0")):
        return Left(f"map_location of the index {text_of(index)}: torch.load knows no index of the CPU")
    source = device_source(facts, node, index)
    if isinstance(source, Left):
        return source
    return whole(node, source)


def _decide_dict(node: cst.Dict, facts: Facts) -> Rewrite | None:
    """Replace `{"cuda:0": f"cuda:{rank}"}`, which moves what the first device has saved to this one."""
    pair = node.elements[0] if len(node.elements) == 1 else None
    if not isinstance(pair, cst.DictElement):
        return None
    (of_device, first), (to_device, index) = index_of(pair.key), index_of(pair.value)
    if not (of_device and to_device) or first is None or text_of(first) != "0":
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

MAPS = Rule(
    "map_location",
    "functions that move what is loaded",
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
    ),
)

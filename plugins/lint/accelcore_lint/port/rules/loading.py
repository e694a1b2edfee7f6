"""Loading of data and of saved states: `pin_memory=True`, `map_location=lambda storage, loc: storage.cuda()`."""

from __future__ import annotations

import libcst as cst

from accelcore_lint.port.facts import Facts
from accelcore_lint.port.model import Example, Left, Level, Rewrite, Rule
from accelcore_lint.port.rules.device_strings import AVAILABLE, device_source, whole
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
    if text_of(node.value) != "True" and not asks:
        return None
    if facts.level is Level.TORCH or facts.place.is_apart(node):
        value = cst.parse_expression(f"{facts.torch}.accelerator.is_available()")
        return Rewrite(lambda updated: updated.with_changes(value=value), node.children, facts.needs_torch)
    value = cst.parse_expression(f"{facts.place.backend(node)}.loading()")
    starred = {"star": "**", "keyword": None, "equal": cst.MaybeSentinel.DEFAULT, "value": value}
    return Rewrite(lambda updated: updated.with_changes(**starred), node.children)


def _decide_map(node: cst.Lambda, facts: Facts) -> Rewrite | Left | None:
    """Replace `lambda storage, loc: storage.cuda(0)`, which moves all that is loaded to a device."""
    arg = facts.parent(node)
    if not isinstance(arg, cst.Arg) or arg.keyword is None or arg.keyword.value != "map_location":
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
    if facts.level is Level.TORCH and index is not None and text_of(index) != "0":
        return Left(f"map_location of the index {text_of(index)}: torch.load knows no index of the CPU")
    source = device_source(facts, node, index)
    if isinstance(source, Left):
        return source
    return whole(node, source)


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
    (cst.Lambda,),
    _decide_map,
    (
        Example(
            Level.ROLES,
            "state = torch.load(path, map_location=lambda storage, loc: storage.cuda())",
            "state = torch.load(path, map_location=accel.device)",
        ),
    ),
)

"""Sources of a device, of its name and of a `map_location`, for the index that a script gives."""

from __future__ import annotations

import itertools
import re

import libcst as cst

from accelcore_lint.port.device_names import index_of, index_source, numbered, with_index, with_type
from accelcore_lint.port.facts import Facts
from accelcore_lint.port.rule import Left, Level
from accelcore_lint.port.syntax import argument, text_of
from accelcore_lint.port.vendors import DEVICES

_INDEX = re.compile(r"\.index\b(?!\()")


def has_indexes(facts: Facts, site: cst.CSTNode, index: cst.BaseExpression) -> bool:
    """Return whether the port names a device by its index, as the script does; not if it is only a default."""
    is_default = text_of(index) != "0" and facts.in_default(site) is not None
    return not is_default and (facts.level is Level.TORCH or facts.place.is_apart(site))


def _refused(index: cst.BaseExpression) -> Left:
    return Left(
        f"device index {text_of(index)}: a process has one device here, which ACCEL_DEVICE or the launcher chooses"
    )


def _needs_index(facts: Facts, site: cst.CSTNode) -> bool:
    """Return whether a device is one that the script then makes current, that a process group gets, or that shows it.

    At level TORCH the accelerator has no index. At the others `accel.device` has one.
    """
    if facts.level is Level.TORCH and _INDEX.search(facts.code):
        return True
    bound = [argument(call, "device_id") for call in facts.calls]
    if any(outer in bound for outer in (site, *facts.parents(site))):
        return True
    outer = [site, *facts.parents(site)]
    assign = next((node for node in outer if isinstance(node, (cst.Assign, cst.BaseStatement))), None)
    names = [text_of(target.target) for target in assign.targets] if isinstance(assign, cst.Assign) else []
    return any(text_of(made) in names for made in (*facts.made_current, *filter(None, bound)))


def device_source(facts: Facts, site: cst.CSTNode, index: cst.BaseExpression | None) -> str | Left:
    """Return the source of the `torch.device` for an index, or the reason why it is not certain."""
    by_hand = facts.level is Level.TORCH or facts.place.by_hand
    named = index is not None and by_hand and _needs_index(facts, site)
    is_own = facts.level is not Level.TORCH or index is None or not facts.is_local_rank(index)
    if facts.is_own(index) and is_own and not named:
        device = facts.device(site) if index is None else facts.place.device(site)
        if index is None or device.endswith(".device") or not _may_be_read(facts, site, index):
            return device
        if facts.guards(site) and not facts.compares(site):
            return f"{facts.torch}.device({device}.type, {index_source(index)})"
        return with_index(facts.torch, device, index_source(index))
    assert index is not None, "the device without an index is the process's own"
    if not has_indexes(facts, site, index):
        return _refused(index)
    if facts.level is not Level.TORCH and facts.sets_device(index, site) and not named:
        device = facts.place.device(site)
        is_read = _may_be_read(facts, site, index)
        return with_index(facts.torch, device, index_source(index)) if is_read else device
    if facts.is_whole(index) or facts.is_local_rank(index):
        made = f"{facts.torch}.device({facts.place.kind(site)}, {index_source(index)})"
        return _or_cpu(facts, site, made) if _is_located(facts, site) else made
    if facts.sets_device(index, site):
        device = facts.place.device(site)
        is_read = _may_be_read(facts, site, index)
        return with_index(facts.torch, device, index_source(index)) if is_read else device
    if facts.in_default(site) is None and isinstance(site, cst.Call) and facts.name(site.func) == "torch.device":
        made = f"{facts.torch}.device({with_type(site, facts.place.kind(site), index_source(index))})"
        return _or_cpu(facts, site, made) if _is_located(facts, site) else made
    if (
        isinstance(site, cst.BaseExpression) and index_of(site)[1] is index
    ):  # in the name of a device it may also be a text
        return kind_source(facts, site, index)
    return Left(f"device index {text_of(index)}: it is not certain that this is a whole number")


def kind_source(facts: Facts, site: cst.CSTNode, index: cst.BaseExpression | None) -> str | Left:
    """Return the source of the device's name as a string, or the reason why it is not certain."""
    own = facts.is_own(index)
    if index is None or (own and text_of(index) == "0"):
        return facts.place.kind(site) if index is None else _first(facts, site)
    text, kind = index_source(index), facts.place.kind(site)
    if has_indexes(facts, site, index) and not (own and facts.level is not Level.TORCH):
        if '"' in text:
            return _refused(index)
        if (not facts.is_current(index) and not _is_located(facts, site)) or facts.guards(site):
            return numbered(kind, text)
    elif not own:
        return _refused(index)
    else:
        device = facts.place.device(site)
        if device.endswith(".device") or not _is_for_library(facts, site):
            return f"str({device})"
    return f'({numbered(kind, text)} if {kind} != "cpu" else "cpu")'  # torch's current device has no index


def _is_located(facts: Facts, site: cst.CSTNode) -> bool:
    """Return whether torch.load may get a device by its name, which refuses "cpu:0", or a line may compare it."""
    is_read = "located" in facts.uses_of or facts.compares(site)
    if not is_read or facts.guards(site) or facts.in_default(site) is not None:
        return False
    return not _is_moved(facts, site)


def _may_be_read(facts: Facts, site: cst.CSTNode, index: cst.BaseExpression) -> bool:
    """Return whether a line may read or compare the index of a device, which the script gives it."""
    is_number = text_of(index) != "None" and (_is_answer(facts, site) or facts.is_current(index))
    return facts.compares(site) or (is_number and not _is_moved(facts, site))


def _is_answer(facts: Facts, site: cst.CSTNode) -> bool:
    """Return whether a function returns a device, or an object keeps it, so that another file may read its index."""
    around = itertools.takewhile(lambda outer: not isinstance(outer, cst.BaseStatement), facts.parents(site))
    kept = next((outer for outer in around if isinstance(outer, (cst.Return, cst.Assign))), None)
    return isinstance(kept, cst.Return) or (
        isinstance(kept, cst.Assign) and any(isinstance(target.target, cst.Attribute) for target in kept.targets)
    )


def _is_moved(facts: Facts, site: cst.CSTNode) -> bool:
    """Return whether a function of torch, or a move such as `x.to(device)`, gets a device: it needs no index."""
    calls = [outer for outer in (site, *facts.parents(site)) if isinstance(outer, cst.Call)]
    outer = next((call for call in calls if facts.name(call.func) != "torch.device"), None)
    is_move = outer is not None and isinstance(outer.func, cst.Attribute) and outer.func.attr.value in ("to", *DEVICES)
    return outer is not None and (is_move or (facts.name(outer.func) or "").startswith("torch."))


def _or_cpu(facts: Facts, site: cst.CSTNode, made: str) -> str:
    """Return the source of a device with an index, or of the CPU without one."""
    device = facts.place.device(site)
    return f'({made} if {device}.type != "cpu" else {device})'


def _is_for_library(facts: Facts, site: cst.CSTNode) -> bool:
    """Return whether a name is an argument of a function that is not torch's, and that may read its index."""
    call = facts.parent(facts.parent(site) or site)
    return isinstance(call, cst.Call) and not (facts.name(call.func) or "").startswith("torch.")


def _first(facts: Facts, site: cst.CSTNode) -> str:
    """Return the source of the name of the process's device, with its index where something may compare it."""
    device, kind = facts.place.device(site), facts.place.kind(site)
    if device.endswith(".device"):
        return f"str({device})"
    return f'({numbered(kind, "0")} if {kind} != "cpu" else "cpu")' if facts.compares(site) else kind


def location_source(facts: Facts, site: cst.CSTNode, index: cst.BaseExpression | None) -> str | Left:
    """Return the source of a `map_location`: that of the CPU has no index, as torch.load refuses "cpu:0"."""
    plain = index is None or (text_of(index) == "0" and facts.is_own(index))
    if index is None or plain or not has_indexes(facts, site, index):
        return device_source(facts, site, index)
    source = facts.place.device(site) if facts.sets_device(index, site) else kind_source(facts, site, index)
    return _plain_for_cpu(facts, site, source)


def default_source(facts: Facts, site: cst.CSTNode, index: cst.BaseExpression | None) -> str | Left:
    """Return the source of an option's default, a string, which the script may give to torch.load."""
    return _plain_for_cpu(facts, site, kind_source(facts, site, index))


def _plain_for_cpu(facts: Facts, site: cst.CSTNode, source: str | Left) -> str | Left:
    """Return the source of a name that has no index if it is the CPU's."""
    is_numbered = isinstance(source, str) and source.startswith('f"')
    return f'({source} if {facts.place.kind(site)} != "cpu" else "cpu")' if is_numbered else source

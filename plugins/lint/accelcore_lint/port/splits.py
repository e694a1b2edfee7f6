"""Splits: questions that stay, and by whose answer a tensor is elsewhere, or something else is done with it."""

from __future__ import annotations

import re

import libcst as cst

from accelcore_lint.port.guards import Guard
from accelcore_lint.port.syntax import text_of

KEPT = "a line of {} that is left tells CUDA from all other devices, so that this choice has to stay: change both"
"""Reason to leave the other questions of a program with a split: all must give the same answer."""

_PLACES = re.compile(
    r"\.(to|cuda|npu|cpu)\(|(?<!\w)dev(ice)?\w*\s*=(?!=)|Tensor\b|\breturn [^\n]*[\"']cpu\b|[\"'](cuda|npu)(:|[\"'])"
    r"|DataListLoader|map_location|[\"']nccl\b|\.half\("
)
"""Words of lines that decide where a tensor or a model is, its precision, or what exchanges it."""

_SHOWS = re.compile(r"(\w+\.)*(print|log|info|warn|warning|debug)\(|pass\b|\"|'|raise\b|sys\.exit\(")
"""Beginnings of lines that only tell something."""


_IDLE = re.compile(
    r"(?:\w+\.)*(?:empty_cache|synchronize|ipc_collect|collect|reset_peak_memory_stats|reset_max_memory_\w+)\([\w.]*\)"
)
"""Lines that compute nothing: another answer elsewhere changes no result."""

_SIZE = re.compile(r"(?:\w+\.)+(?:max_)?memory_(?:allocated|reserved|cached)\([\w.]*\)(?: *[*/] *[\w ()*.<]+)?")
"""Sizes of memory, which are 0 on a device that has no tensors."""


def is_idle(guard: cst.CSTNode | None) -> bool:
    """Return whether a condition only decides whether something waits, clears a cache, or shows a size of memory."""
    if isinstance(guard, cst.IfExp):
        return _SIZE.fullmatch(text_of(guard.body)) is not None and text_of(guard.orelse) in ("0", "0.0")
    lines = guard.body.body if isinstance(guard, (cst.If, cst.Else)) else ()
    calls = [part for line in lines for part in (line.body if isinstance(line, cst.SimpleStatementLine) else [line])]
    other = guard.orelse if isinstance(guard, cst.If) else None
    return bool(calls) and all(_IDLE.fullmatch(text_of(call)) for call in calls) and (other is None or is_idle(other))


def is_split(guard: Guard | None) -> bool:
    """Return whether a condition that stays decides where something is, or between two things to do."""
    if isinstance(guard, cst.IfExp):
        return places(guard) or not (_is_plain(guard.body) or _is_plain(guard.orelse))
    if not isinstance(guard, cst.If) or is_idle(guard):
        return False
    return places(guard) or (guard.orelse is not None and not (_shows(guard.body) or _shows(guard.orelse)))


def places(guard: cst.CSTNode) -> bool:
    """Return whether a branch of a condition moves something, or chooses a device."""
    branches = (getattr(guard, "body", None), getattr(guard, "orelse", None))
    return any(_PLACES.search(text_of(branch)) for branch in branches if branch is not None)


def _is_plain(value: cst.BaseExpression) -> bool:
    """Return whether a value is a constant, such as the number that is shown where there is no device."""
    constants = (cst.BaseNumber, cst.BaseString, cst.UnaryOperation)
    return isinstance(value, constants) or text_of(value) in ("None", "True", "False", "[]", "{}", "()")


def _shows(branch: cst.CSTNode) -> bool:
    """Return whether a branch only prints something, or stops."""
    block = branch.body if isinstance(branch, cst.Else) else branch
    lines = block.body if isinstance(block, cst.IndentedBlock) else ()
    return bool(lines) and all(_SHOWS.match(text_of(line)) for line in lines)

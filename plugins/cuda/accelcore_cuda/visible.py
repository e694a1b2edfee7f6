"""Which GPUs CUDA_VISIBLE_DEVICES leaves visible: the rules of CUDA, as torch counts by them. Free of torch.

A list of indices or of UUIDs; its first entry says which. An entry that names no GPU ends the list, without an error:
what comes before it stays visible. A GPU that is named twice hides all. A UUID may be shortened to a beginning that
only one GPU has. Of MIG instances CUDA enumerates one. HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES follow the same
rules. CUDA_DEVICE_ORDER says which GPU has which index, and so changes no count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from accelcore.util.text import shown

__all__ = ["Visible", "visible"]

_NUMBER = re.compile(r"[+-]?[0-9]{1,9}", re.ASCII)  # the rest of an entry is ignored, as strtoul does


@dataclass(frozen=True)
class Visible:
    """What a variable leaves.

    Attributes:
        count: how many GPUs.
        note: what it does that its author may not have meant; empty where it does nothing of the kind.
    """

    count: int
    note: str = ""


def visible(variable: str, value: str | None, present: int, uuids: Sequence[str] | None = None) -> Visible:
    """Count the GPUs that `variable` leaves visible of `present` ones.

    Args:
        value: the variable's value; None where it is not set.
        uuids: those of the GPUs, as far as they are known; None counts every entry that could be one.
    """
    if value is None:
        return Visible(present)
    entries = value.split(",")
    setting = f"{variable}={shown(value)}"
    if value.startswith("MIG-"):
        note = f"{setting} names {len(entries)} MIG instances, of which CUDA uses one" if len(entries) > 1 else ""
        return Visible(1, note)
    named: list[object] = []
    for entry in entries:
        name = _identifier(entry, by_uuid=value.startswith("GPU-"))
        if name is None:
            break
        if name in named:
            return Visible(0, f"{setting} names a GPU twice, which hides every GPU")
        named.append(name)
    found: list[object] = []
    for name in named:
        gpu = _lookup(name, present, uuids)
        if gpu is None:
            break
        if gpu in found:
            return Visible(0, f"{setting} names a GPU twice, which hides every GPU")
        found.append(gpu)
    if not found:
        return Visible(0, f"{setting} hides every GPU")
    if len(found) < len(entries):
        return Visible(len(found), f"{setting} ends at {shown(entries[len(found)])}, which names no GPU")
    return Visible(len(found))


def _identifier(entry: str, *, by_uuid: bool) -> object | None:
    """What an entry says: a UUID, an index, or nothing."""
    if by_uuid:
        return entry if entry.startswith("GPU-") else None
    match = _NUMBER.match(entry.strip())
    if match is None or int(match[0]) < 0:
        return None
    return int(match[0])


def _lookup(name: object, present: int, uuids: Sequence[str] | None) -> object | None:
    """The GPU of that name; None where there is none, or more than one."""
    if isinstance(name, int):
        return name if name < present else None
    if uuids is None:
        return name
    matches = [number for number, uuid in enumerate(uuids) if uuid.startswith(str(name))]
    return matches[0] if len(matches) == 1 else None

"""GPUs that a process may use, and their count by CUDA's rules for CUDA_VISIBLE_DEVICES. Does not import torch.

The variable is a list of indices or of UUIDs; the first entry decides which. An entry that names no GPU ends the list
without an error: earlier entries stay visible. A GPU that is named twice hides all. A UUID may be shortened to a unique
prefix. CUDA uses only one MIG instance. HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES follow the same rules.
CUDA_DEVICE_ORDER changes the order of the indices, not the count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from accelcore.util.text import shown

_NUMBER = re.compile(r"[+-]?[0-9]{1,9}", re.ASCII)  # like strtoul, ignores the rest of an entry


Fault = tuple[str, str]  # reason why a device cannot be used, and the remedy


@dataclass(frozen=True)
class Hardware:
    """The GPUs of one vendor that this process may use."""

    words: str  # description: `"2 NVIDIA GPUs, driver 580.65.06"`
    count: int
    driver: str | None = None  # version of the driver; None if it cannot be read
    notes: tuple[str, ...] = ()  # remarks that do not prevent use


@dataclass(frozen=True)
class Visible:
    """GPUs that a variable leaves visible."""

    count: int
    note: str = ""  # probably unintended effect of the variable


def visible(variable: str, value: str | None, present: int, uuids: Sequence[str] | None = None) -> Visible:
    """Count the GPUs that `variable` leaves visible of `present` ones; a `value` of None means that it is not set.

    Without `uuids` of the GPUs, every entry that could be a UUID counts.
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
    """Return the UUID or index in an entry, or None."""
    if by_uuid:
        return entry if entry.startswith("GPU-") else None
    match = _NUMBER.match(entry.strip())
    if match is None or int(match[0]) < 0:
        return None
    return int(match[0])


def _lookup(name: object, present: int, uuids: Sequence[str] | None) -> object | None:
    """Return the GPU with that name; None if there is none, or more than one."""
    if isinstance(name, int):
        return name if name < present else None
    if uuids is None:
        return name
    matches = [number for number, uuid in enumerate(uuids) if uuid.startswith(str(name))]
    return matches[0] if len(matches) == 1 else None

"""Detection of AMD GPUs by files. torch built for ROCm calls them `cuda`. This module does not import torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from accelcore_cuda.visible import Fault, Hardware, Visible, visible

_DEVICE = Path("/dev/kfd")
_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def present() -> bool:
    """Return whether AMD's compute driver is loaded."""
    return _DEVICE.exists()


def look(environ: Mapping[str, str]) -> Hardware | Fault:
    """Return the AMD GPUs that this process may use, or why there are none."""
    if not present():
        return "torch is built for ROCm, and there is no AMD GPU (no /dev/kfd)", "install AMD's amdgpu driver"
    if not os.access(_DEVICE, os.R_OK | os.W_OK):
        return "this user may not open /dev/kfd", "join the group that owns it, often render"
    uuids = _gpus()
    if not uuids:
        return "AMD's driver is loaded, but it shows no GPU", "see the output of rocminfo"
    seen = _visible(environ, uuids)
    if not seen.count:
        return seen.note, "unset that variable, or name GPUs in it that exist, each once"
    words = f"{seen.count} AMD GPU{'' if seen.count == 1 else 's'} through ROCm"
    return Hardware(words, seen.count, notes=(seen.note,) if seen.note else ())


def _visible(environ: Mapping[str, str], uuids: list[str]) -> Visible:
    """Apply ROCm's variable, then HIP's to the remaining GPUs; HIP reads CUDA's variable if its own is not set."""
    outer = visible("ROCR_VISIBLE_DEVICES", environ.get("ROCR_VISIBLE_DEVICES"), len(uuids), uuids)
    variable = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in environ else "CUDA_VISIBLE_DEVICES"
    if not outer.count:
        return outer
    inner = visible(variable, environ.get(variable), outer.count, uuids if outer.count == len(uuids) else None)
    return inner if inner.note or not outer.note else Visible(inner.count, outer.note)


def _gpus() -> list[str]:
    """Return the UUIDs of the GPUs: the driver's nodes with SIMD units, which processors lack."""
    found = []
    for path in sorted(_NODES.glob("*/properties"), key=lambda path: path.parent.name.zfill(4)):
        try:
            properties = dict(re.findall(r"^(\w+) (\d+)$", path.read_text(encoding="ascii"), re.MULTILINE))
        except (OSError, ValueError):  # a node of a GPU that this container was not given
            continue
        if int(properties.get("simd_count", 0)):
            found.append(f"GPU-{int(properties.get('unique_id', 0)):016x}")
    return found

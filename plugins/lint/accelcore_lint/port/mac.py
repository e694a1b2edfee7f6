"""What a program uses and MPS lacks, which `torch.accelerator` takes on a Mac where CUDA's scripts took the CPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from accelcore_lint.port.syntax import STRING

_LACKS = {
    "float64": re.compile(
        r"\.double\(\)|\bset_default_dtype\(torch\.(?:float64|double)\)|\bdtype *= *torch\.(?:float64|double)\b"
        r"|\.to\(torch\.(?:float64|double)\)|\bDoubleTensor\b"
        r"|\btorch\.(?:as_)?tensor\((?:np|numpy)\.(?:log|exp|sqrt|mean|std|zeros|ones|linspace|random\.\w+)\("
        r"(?![^\n]*(?:float|int|long|bool))"
    ),
    "properties of devices": re.compile(r"\b(?:get_device_properties|memory_stats)\("),
    "streams": re.compile(
        r"\b(?:torch\.cuda|get_device_module\(\))\.(?:Stream|stream|current_stream)\("
        r"|(?ms:\A(?=.*^[ \t]*from torch import\b[^\n]*\bcuda\b).*?(?<![\w.])cuda\.(?:Stream|stream|current_stream)\()"
    ),
    "numbers of generators": re.compile(r"\bfork_rng\([^\n]*current_device\("),
    "process groups": re.compile(r"\binit_process_group\("),
    "DataParallel": re.compile(r"(?<!\w)DataParallel\("),
}
_NOT_CODE = re.compile(rf"{STRING}|#.*")


def lacks_of_mps(texts: Mapping[Path, str]) -> str:
    """Return the line of the report that names what files use and MPS lacks, each with one place; "" if nothing."""
    found = []
    codes = {path: _NOT_CODE.sub(lambda match: "\n" * match[0].count("\n"), text) for path, text in texts.items()}
    for what, pattern in _LACKS.items():
        for path, code in sorted(codes.items()):
            if match := pattern.search(code):
                line = code.count("\n", 0, match.end()) + 1
                found.append(f"{what} ({path.name}:{line})")
                break
    if not found:
        return ""
    on_cpu = "Tensors on the CPU may be float64. " if found[0].startswith("float64") else ""
    return (
        f"on a Mac: torch.accelerator takes MPS, which has no {', '.join(found)}. {on_cpu}To stay on the CPU there, "
        'write torch.device("cpu") where the device is chosen'
    )

"""Checks of the CANN installation by its files: location, version, missing libraries.

Nothing is loaded: a library counts as present if the dynamic linker would find a file of its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

LIBRARIES = ("libascendcl.so", "libacl_op_compiler.so", "libge_runner.so", "libgraph.so", "libhccl.so")
"""Libraries that torch_npu links to: `import torch_npu` fails if one is missing."""

_CACHE = Path("/etc/ld.so.cache")
_VERSION = re.compile(r"^\s*version\s*=\s*(\S+)", re.MULTILINE | re.IGNORECASE)
_SOURCE_IT = "source the set_env.sh of your CANN installation (/usr/local/Ascend/ascend-toolkit/set_env.sh)"
_INSTALL = f"install CANN, and {_SOURCE_IT}"


def cann_fault(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return why torch_npu would not find a working CANN, and what to do; None if it would.

    torch_npu makes the same checks on import, and the dynamic linker before it.
    """
    home = environ.get("ASCEND_HOME_PATH")
    if not home:
        return "CANN is not set up (ASCEND_HOME_PATH is not set)", _INSTALL
    if not Path(home).is_dir():
        return f"there is no CANN at ASCEND_HOME_PATH={home}", _INSTALL
    operators = environ.get("ASCEND_OPP_PATH")
    if not operators or not Path(operators).is_dir():
        state = "is not set" if not operators else f"={operators} does not exist"
        return f"CANN has no operators (ASCEND_OPP_PATH {state})", f"install CANN's operator package, and {_SOURCE_IT}"
    for part in ("runtime", "compiler"):
        if not (Path(home) / part).is_dir():
            return f"CANN at {home} has no {part}", f"install CANN's {part} package, and {_SOURCE_IT}"
    missing = missing_libraries(environ)
    if not missing:
        return None
    elsewhere = [name for name in missing if any(Path(home).glob(f"lib*/{name}"))]
    if elsewhere == missing:
        return f"{', '.join(missing)} of CANN at {home} is not on LD_LIBRARY_PATH", _SOURCE_IT
    lost = ", ".join(name for name in missing if name not in elsewhere)
    return f"CANN at {home} lacks {lost}", f"repair the CANN installation, and {_SOURCE_IT}"


def missing_libraries(environ: Mapping[str, str]) -> list[str]:
    """Return the libraries of CANN that the dynamic linker would not find."""
    folders = [Path(folder) for folder in environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    try:
        cached = _CACHE.read_bytes()
    except OSError:
        cached = b""
    return [
        name
        for name in LIBRARIES
        if not any((folder / name).exists() for folder in folders) and f"\0{name}\0".encode() not in cached
    ]


def cann_version(environ: Mapping[str, str]) -> str | None:
    """Return the version of CANN at ASCEND_HOME_PATH, from its installer's file; None if it is not found."""
    home = environ.get("ASCEND_HOME_PATH")
    if not home:
        return None
    for pattern in ("ascend_*_install.info", "*/ascend_*_install.info"):
        for path in sorted(Path(home).glob(pattern)):
            try:
                match = _VERSION.search(path.read_text(encoding="utf-8", errors="replace"))
            except OSError:
                continue
            if match:
                return match[1]
    return None

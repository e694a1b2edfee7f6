"""C++ compiler that builds the kernels."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

# No -ffast-math: nan and inf stay what they are, and nothing is reassociated or contracted, so that the same operations
# give the same bits on every machine. Errno and traps, which are given up, would keep loops from being vectorized.
FLAGS = (
    "-std=c++20",
    "-O3",
    "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native",
    # g++ prefers narrower vectors than there are on most of Intel's processors and on the oldest Zen, and would take
    # the kernels' apart: each fused multiply-add became 8 or 16 scalar ones.
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "i686") else ()),
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-fPIC",
)
LINKS = ("-shared", *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()))  # for Python's functions
_SECONDS = 300
_TORCH = Path(torch.__file__).parent


def missing_compiler() -> str | None:
    """Return why there is no C++ compiler, or None. CXX counts; the compiler is not run."""
    if os.name != "posix":
        return "the kernels are built by g++ or clang++, on Linux and macOS"
    command = _command()
    if command and shutil.which(command[0]):
        return None
    if "CXX" in os.environ:
        return f"the C++ compiler CXX={os.environ['CXX']!r} cannot be run (name one that can, or unset CXX)"
    return "there is no C++ compiler (install g++, or name a compiler in CXX)"


def compiler_version() -> str:
    """Return the compiler's own description; an OSError or SubprocessError says that it cannot be run."""
    return _version(tuple(_command()))


def compile_to(sources: Sequence[Path], library: Path) -> None:
    """Compile files, at the same time, to a shared library beside torch's; errors as `compiler_version`."""
    objects = [library.with_name(f"{source.stem}.o") for source in sources]
    with ThreadPoolExecutor(len(sources)) as pool:
        list(pool.map(compile_one, sources, objects))
    libraries = _TORCH / "lib"
    torchs = (f"-L{libraries}", "-lc10", f"-Wl,-rpath,{libraries}")
    _run((*_command(), *LINKS, *map(str, objects), *torchs, "-o", str(library)))


def compile_one(source: Path, compiled: Path, *more: str) -> None:
    """Compile a file to an object, with torch's headers; `more` are options of the compiler."""
    _run((*_command(), *FLAGS, f"-I{_TORCH / 'include'}", "-c", *more, str(source), "-o", str(compiled)))


@cache
def cpu() -> str:
    """Return the model of this CPU and its instructions, on which compiled code depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    told = [
        line for line in lines if line.startswith(("model name", "flags", "Features", "CPU implementer", "CPU part"))
    ]
    return "\n".join((platform.system(), platform.machine(), platform.processor(), *told))


def _command() -> list[str]:
    named = os.environ.get("CXX")
    if named is not None:
        return shlex.split(named)
    return ["clang++" if sys.platform == "darwin" else "g++"]


@cache
def _version(command: tuple[str, ...]) -> str:
    return _run((*command, "--version"))


def _run(command: tuple[str, ...]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS).stdout  # noqa: S603  # the compiler the user names

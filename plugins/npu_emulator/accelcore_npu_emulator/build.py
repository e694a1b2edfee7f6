"""Compile the emulated CANN against the headers in the torch_npu wheel, once for each version of both."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from accelcore.errors import BackendUnavailableError, ConfigurationError
from accelcore_npu_emulator.wheel import cache, torch_npu

_SOURCES = Path(__file__).parent / "cann"
_OWN_SOURCE = {"ge_runner": "graph_engine.cpp", "graph": "allocator_options.cpp"}
# torch_npu looks for these libraries by name; here libascendcl contains all their functions.
_NAMES_ONLY = (
    "hccl",
    "acl_op_compiler",
    "fmk_parser",
    "ascend_protobuf",
    "acl_tdt_channel",
    "nnopbase",
    "opapi",
    "ascend_hal",
    "ascend_dump",
    "ascend_ml",
    "msprofiler",
    "hcomm",
    "ms_tools_ext",
    "mspti",
)
LIBRARIES = tuple(f"lib{name}.so" for name in ("ascendcl", *_OWN_SOURCE, *_NAMES_ONLY))
"""File names of the libraries, in an order in which they can be loaded."""

_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")


def libraries() -> Path:
    """Return the folder of the emulated CANN's libraries and its home, `cann`. Compile it if needed."""
    found = torch_npu()
    headers = Path(str(found.locate_file("torch_npu/include")))
    compiler = _compiler()
    folder = cache() / _key(found.version, compiler)
    if not folder.is_dir():
        _build(folder, compiler, headers)
    return folder


def _compiler() -> tuple[str, ...]:
    text = os.environ.get("CXX", "g++")
    try:
        command = tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigurationError(
            f"CXX={text!r} is not a command", why=str(error), remedy="quote its words as in a shell, or unset it"
        ) from error
    path = shutil.which(command[0]) if command else None
    if path is None:
        raise BackendUnavailableError(
            "the NPU cannot be emulated",
            why=f"there is no C++ compiler ({text or 'CXX is empty'})",
            remedy="install g++, or name a compiler in CXX",
        )
    return (path, *command[1:])


def _key(torch_npu_version: str, compiler: Sequence[str]) -> str:
    version = _run([*compiler, "--version"])
    digest = hashlib.sha256(repr((torch_npu_version, compiler, version, _FLAGS, LIBRARIES)).encode())
    for source in sorted(_SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _build(folder: Path, compiler: Sequence[str], headers: Path) -> None:
    """Build into a temporary folder and rename it. If two processes build at once, the first result stays."""
    scratch, began = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent)), time.perf_counter()
    sys.stderr.write("EMULATED: compiling the emulated CANN, which takes about ten seconds and is done once\n")
    try:
        _compile(scratch, compiler, headers)
        sys.stderr.write(f"EMULATED: compiled the emulated CANN in {time.perf_counter() - began:.0f} seconds\n")
        _make_home(scratch / "cann")
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _compile(folder: Path, compiler: Sequence[str], headers: Path) -> None:
    sources = sorted(str(source) for source in _SOURCES.glob("*.cpp") if source.name not in _OWN_SOURCE.values())
    include = f"-I{headers}"
    _run([*compiler, *_FLAGS, include, *_named("ascendcl", folder), *sources, "-lpthread", "-ldl"])
    for name, source in _OWN_SOURCE.items():
        _run([*compiler, *_FLAGS, include, *_named(name, folder), str(_SOURCES / source)])
    empty = folder / "empty.cpp"
    empty.touch()
    refers = ["-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", f"-L{folder}", "-lascendcl"]
    for name in _NAMES_ONLY:
        _run([*compiler, *_FLAGS, *_named(name, folder), str(empty), *refers])
    empty.unlink()


def _named(name: str, folder: Path) -> list[str]:
    return [f"-Wl,-soname,lib{name}.so", "-o", str(folder / f"lib{name}.so")]


def _run(command: Sequence[str]) -> str:
    # The user chooses the compiler through CXX; no shell reads the command.
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if result.returncode:
        raise BackendUnavailableError(
            "the NPU cannot be emulated",
            why=f"{command[0]} failed:\n{result.stderr.strip()[-2000:]}",
            remedy="use g++ 9 or later, or name another compiler in CXX",
        )
    return result.stdout


def _make_home(home: Path) -> None:
    """Create the folders of a CANN installation that torch_npu checks."""
    for folder in ("runtime", "compiler", "opp"):
        (home / folder).mkdir(parents=True)
    (home / "ascend_emulated_install.info").write_text("version=8.5.0\n")

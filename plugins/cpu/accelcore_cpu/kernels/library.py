"""Library of the kernels: built when a process first needs it, or found in the cache."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import torch

from accelcore.errors import logger
from accelcore_cpu.kernels import compiler, store

_SOURCES = Path(__file__).parent
_SECONDS = 0.5  # that the measurement of the prefetch takes
_lock = threading.Lock()
_loaded: list[ctypes.CDLL] = []
_failed: list[str] = []


def unavailable(*, build: bool) -> str | None:
    """Return why there are no kernels here, or None. Without `build`, only look for a compiler."""
    if not _loaded and not _failed:
        reason = compiler.missing_compiler()
        if not build:
            return reason
        with _lock:
            if not _loaded and not _failed:
                _begin(reason)
    return _failed[0] if _failed else None


def load() -> ctypes.CDLL:
    """Return the library, after `unavailable(build=True)` returned None."""
    reason = unavailable(build=True)
    assert reason is None, reason
    return _loaded[0]


def _begin(reason: str | None) -> None:
    try:
        if reason is None:
            _loaded.append(_library())
            return
    except subprocess.CalledProcessError as error:
        reason = f"the C++ compiler failed: {(error.stderr or str(error)).strip()[:500]}"
    except (OSError, subprocess.SubprocessError) as error:
        reason = f"they cannot be built or loaded: {error}"
    _failed.append(reason)
    logger.warning("optimizers run without the kernels for this CPU, and slower: %s", reason)


def _library() -> ctypes.CDLL:
    key = _key()
    with suppress(OSError):  # no home folder, as `open_folder` says
        kept = store.find(store.folder(), key)
        if kept is not None:
            return _typed(*kept)
    logger.warning("building the optimizers' kernels for this CPU, which takes some 15 seconds and is done once")
    try:
        folder = store.open_folder()
    except OSError as error:
        logger.warning(
            "they cannot be kept, and each process will build them again: %s. Set ACCEL_KERNEL_CACHE to the absolute "
            "path of a folder that only you can write to",
            error,
        )
        with tempfile.TemporaryDirectory(prefix="accelcore-") as place:
            return _typed(*_built(Path(place)))
    with tempfile.TemporaryDirectory(dir=folder) as place:
        built, ahead = _built(Path(place))
        library = _typed(built, ahead)  # first: a process that builds at the same time may replace what is kept
        store.keep(folder, key, built, ahead)
        return library


def _built(folder: Path) -> tuple[Path, int]:
    """Build the library, and measure how many bytes before its use memory is best asked for here."""
    path, began = folder / "kernels.so", time.perf_counter()
    compiler.compile_to(sorted(_SOURCES.glob("*.cpp")), path)
    library = ctypes.CDLL(str(path))
    library.prefetch_quickest.restype, library.prefetch_quickest.argtypes = ctypes.c_long, [ctypes.c_double]
    ahead: int = library.prefetch_quickest(_SECONDS)
    seconds = time.perf_counter() - began
    logger.warning("built the optimizers' kernels in %.0f seconds", seconds)
    return path, ahead


def _key() -> str:
    """Return a digest of everything that a build depends on."""
    sources = [file.read_text() for file in sorted(_SOURCES.iterdir()) if file.suffix in (".cpp", ".h")]
    flags = (*compiler.FLAGS, *compiler.LINKS)
    parts = (*sources, compiler.compiler_version(), *flags, compiler.cpu(), torch.__version__, torch.__file__)
    return sha256("\0".join(parts).encode()).hexdigest()[:32]


def _typed(path: Path, ahead: int) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    pointer, number, long, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_double
    # These read torch's objects, for which they hold Python's lock.
    holding = ctypes.PyDLL(str(path))
    for name in ("tensors_new", "tensors_find", "tensors_bump_versions", "tensors_release", "tensors_free"):
        setattr(library, name, getattr(holding, name))
    for name, result, arguments in (
        ("tensors_new", pointer, [pointer, pointer, long, pointer, long]),
        ("tensors_free", None, [pointer]),
        ("tensors_find", number, [pointer, *[ctypes.py_object] * 3, pointer]),
        ("tensors_bump_versions", None, [pointer, pointer]),
        ("tensors_release", None, [pointer]),
        ("prefetch_set", None, [long]),
        ("plan_new", pointer, [ctypes.c_char_p, pointer, pointer, long, pointer, long]),
        ("plan_free", None, [pointer]),
        ("plan_step", ctypes.c_bool, [pointer, pointer, pointer, long, real, number]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.prefetch_set(ahead)
    logger.info("the optimizers' kernels prefetch %d bytes ahead, which is fastest on this CPU", ahead)
    return library

"""Cache of built kernels: a folder that only its user can write to, with one file for each build.

A file's name holds the key of the build, a number that was measured with it, and the digest of the content. A file that
was cut off or changed is never loaded.
"""

from __future__ import annotations

import os
import stat
from hashlib import sha256
from pathlib import Path

from platformdirs import user_cache_dir

from accelcore.errors import ConfigurationError
from accelcore.util.text import shown

_VARIABLE = "ACCEL_KERNEL_CACHE"
_REMEDY = f"set {_VARIABLE} to a folder that only you can write to (it is created if needed), or unset it"


def folder() -> Path:
    """Return the folder of ACCEL_KERNEL_CACHE, or one in the user's cache; OSError if the user has no home folder."""
    named = os.environ.get(_VARIABLE)
    if not named:
        try:
            return Path(user_cache_dir("accelcore")) / "kernels"
        except RuntimeError as error:
            raise OSError(str(error)) from error
    path = Path(named)
    if not path.is_absolute() or (path.exists() and not path.is_dir()):
        raise ConfigurationError(f"{_VARIABLE}={shown(named)} is not the absolute path of a folder", remedy=_REMEDY)
    return path


def check_named_folder() -> None:
    """Refuse an ACCEL_KERNEL_CACHE that cannot be used; one with built kernels may be read-only."""
    if os.environ.get(_VARIABLE):
        open_folder(built=True)


def open_folder(*, built: bool = False) -> Path:
    """Create the folder if needed, and return it; one with kernels need not be writable if `built`.

    An OSError has the reason why it cannot be used; a ConfigurationError, if the user named it.
    """
    try:
        path = folder()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check(path.stat(), path)
        if not os.access(path, os.W_OK | os.X_OK) and not (built and any(path.glob("*.so"))):
            raise OSError(f"{path} cannot be written to")
    except OSError as error:
        if named := os.environ.get(_VARIABLE):
            raise ConfigurationError(f"{_VARIABLE}={shown(named)} cannot be used: {error}", remedy=_REMEDY) from error
        raise
    return path


def find(path: Path, key: str) -> tuple[Path, int] | None:
    """Return the library that was built for `key`, and its choice, or None. It must be complete, and of this user."""
    try:
        _check(path.stat(), path)
        for file in sorted(path.glob(f"{key}-*.so")):
            status = file.lstat()
            _check(status, file)
            choice = int(file.stem.split("-")[1])
            if stat.S_ISREG(status.st_mode) and file == _named(path, key, choice, file.read_bytes()):
                return file, choice
    except (OSError, ValueError):
        pass
    return None


def keep(path: Path, key: str, built: Path, choice: int) -> Path:
    """Move a built file into the folder, atomically; it replaces other files for `key`."""
    built.chmod(0o700)
    place = _named(path, key, choice, built.read_bytes())
    os.replace(built, place)
    for other in path.glob(f"{key}-*.so"):
        if other != place:
            other.unlink(missing_ok=True)
    return place


def _named(path: Path, key: str, choice: int, content: bytes) -> Path:
    return path / f"{key}-{choice}-{sha256(content).hexdigest()[:32]}.so"


def _check(status: os.stat_result, path: Path) -> None:
    """Refuse a path that another user could have written: code is loaded from it."""
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others can write to {path}")

"""Where built kernels are kept: a folder that only its user can write to, one file for each build.

A file's name holds what was built, and the digest of its content: a file that was cut off, or changed, is not loaded.
"""

from __future__ import annotations

import os
import stat
from hashlib import sha256
from pathlib import Path

from platformdirs import user_cache_dir

from accelcore.errors import ConfigurationError
from accelcore.wording import shown

__all__ = ["find", "folder", "keep", "open_folder"]

_VARIABLE = "ACCEL_KERNEL_CACHE"


def folder() -> Path:
    """ACCEL_KERNEL_CACHE, or the user's cache.

    Raises:
        ConfigurationError: the variable is no absolute path, or that of a file.
    """
    named = os.environ.get(_VARIABLE)
    if not named:
        return Path(user_cache_dir("accelcore")) / "kernels"
    path = Path(named)
    if not path.is_absolute() or (path.exists() and not path.is_dir()):
        raise ConfigurationError(
            f"{_VARIABLE}={shown(named)} is not the absolute path of a folder",
            remedy="set it to a folder that only you can write to, which is made if need be; or unset it",
        )
    return path


def open_folder() -> Path:
    """The folder, made where there is none.

    Raises:
        OSError: it cannot be used; the message says why.
    """
    path = folder()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check(path.stat(), path)
    if not os.access(path, os.W_OK | os.X_OK):
        raise OSError(f"{path} cannot be written to")
    return path


def find(path: Path, key: str) -> Path | None:
    """What was built for `key`, if it is there, whole, and this user's."""
    try:
        _check(path.stat(), path)
        for file in sorted(path.glob(f"{key}-*.so")):
            status = file.lstat()
            _check(status, file)
            if stat.S_ISREG(status.st_mode) and file == _named(path, key, file.read_bytes()):
                return file
    except OSError:
        pass
    return None


def keep(path: Path, key: str, built: Path) -> Path:
    """Put a file that was built into the folder, at once and whole, in place of any other for `key`."""
    built.chmod(0o700)
    place = _named(path, key, built.read_bytes())
    os.replace(built, place)
    for other in path.glob(f"{key}-*.so"):
        if other != place:
            other.unlink(missing_ok=True)
    return place


def _named(path: Path, key: str, content: bytes) -> Path:
    return path / f"{key}-{sha256(content).hexdigest()[:32]}.so"


def _check(status: os.stat_result, path: Path) -> None:
    """Code is loaded from there: nobody else may have written it."""
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others can write to {path}")

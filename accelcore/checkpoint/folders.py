"""Folders of checkpoints: their names and order, and paths that a user gives. Imports no torch."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

from accelcore.errors import CheckpointError, ConfigurationError

NAME = re.compile(r"step-\d{8,}(-\d+)?")
SAVED = "give the folder that trainer.save(folder) was given"


def as_path(given: Any) -> Path:
    """Return a path that the user gave, `~` expanded; raise ConfigurationError if no file can have it."""
    try:
        if given == "":
            raise ValueError("it is empty")
        path = Path(given)
        if os.fspath(given).startswith("~"):  # not for "./~", which a Path makes "~"
            path = path.expanduser()
        path.stat()
    except (TypeError, ValueError, RuntimeError) as error:  # not a path; empty, or with a NUL; no such user's home
        why = "" if isinstance(error, TypeError) else str(error)
        remedy = "give a string or a pathlib.Path, such as outputs/run"
        raise ConfigurationError(f"{repr(given)[:80]} is not a path", why=why, remedy=remedy) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            text = f"the path {str(given)[:60]!r}... has {len(str(given))} characters: {error.strerror}"
            raise ConfigurationError(text, remedy="give a shorter path") from error
    return path


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if NAME.fullmatch(path.name)), key=order_of)


def after_steps(folder: Path, steps: int) -> Path:
    """Return the newest checkpoint in `folder` that was saved after so many steps; `folder` if it is a checkpoint."""
    if NAME.fullmatch(folder.name):
        return folder
    found = [path for path in checkpoints(folder) if order_of(path)[0] == steps]
    return found[-1] if found else folder / f"step-{steps:08d}"


def near(folder: Path) -> str:
    """Return up to five folders with checkpoints, for a message: those in `folder`, one below, and its parent."""
    # `glob` skips a folder that may not be read, such as another user's in /tmp.
    paths = (*folder.parent.glob("step-*"), *folder.glob("*/step-*"), *folder.glob("*/*/step-*"))
    return ", ".join(map(str, sorted({path.parent for path in paths if NAME.fullmatch(path.name)})[:5]))


def no_checkpoint(folder: Path, remedy: str) -> CheckpointError:
    """Return the error for a folder without a checkpoint; it names folders that may be meant."""
    why = "" if folder.exists() else "there is no such folder"
    return CheckpointError(f"there is no checkpoint in {folder}", why=why, available=near(folder), remedy=remedy)


def order_of(path: Path) -> tuple[int, int]:
    """Return the steps in a checkpoint's name, and its number among the checkpoints of the same steps."""
    _, steps, *number = path.name.split("-")
    return int(steps), int(number[0]) if number else 0


def check_export(checkpoint: str | Path, file: str | Path) -> tuple[Path, Path]:
    """Return both as paths; raise an error if the first is missing, or the second cannot be written by an export."""
    folder, target = as_path(checkpoint), as_path(file)
    if target.exists() and not target.is_file():  # such as /dev/null
        raise ConfigurationError(f"{target} is a folder or no regular file", remedy="name a file")
    if target.suffix != ".safetensors":
        raise ConfigurationError(
            f"{target} does not end in .safetensors",
            why="other programs choose the format by the name of a file",
            remedy=f"write {target.with_suffix('.safetensors')}",
        )
    if not folder.exists():
        raise no_checkpoint(folder, SAVED)
    return folder, target

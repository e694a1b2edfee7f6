"""Search for the checkpoint to resume from."""

from __future__ import annotations

import json
from pathlib import Path

from accelcore.checkpoint.manifest import MANIFEST, RANK
from accelcore.checkpoint.store import Checkpoint, checkpoints, is_checkpoint_name, place_of
from accelcore.errors import CheckpointError

__all__ = ["find"]


def find(folder: Path, share: tuple[int, int] = (0, 1)) -> Checkpoint | None:
    """Return `folder` if it is a checkpoint, else the newest checkpoint in it, even if it was renamed.

    Args:
        folder: a checkpoint, or a folder of checkpoints.
        share: rank and number of ranks; see `Checkpoint`.

    Raises:
        CheckpointError: `folder` is a file, or the checkpoint is damaged or incomplete.
    """
    if (folder / MANIFEST).exists() or is_checkpoint_name(folder):
        return Checkpoint(folder, share)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(
            f"{folder} is a file",
            remedy="give the folder of the checkpoints; load another program's file by trainer.load(...)",
        )
    if any(folder.glob(f"{RANK}*.safetensors")):
        raise _not_whole(folder)
    named = checkpoints(folder)
    found = {path: place_of(path)[0] for path in named[-1:]}
    found.update({path: _steps_in(path) for path in _renamed(folder)})
    if not found:
        return None
    return Checkpoint(max(found, key=found.__getitem__), share)  # of equal steps the first one, which kept its name


def _not_whole(folder: Path) -> CheckpointError:
    """Return the error of a folder that has files of ranks and no manifest."""
    if (folder.parent / MANIFEST).is_file():
        return CheckpointError(
            f"{folder} is a part of a checkpoint",
            why="several trainers were saved together",
            remedy=f"resume all of them: accelcore.Together(...).resume({str(folder.parent)!r}); or export its model: "
            f"accelcore export --trainer {folder.name} {folder.parent} FILE",
        )
    return CheckpointError(f"{folder} is a checkpoint without its {MANIFEST}", remedy="resume from another one")


def _renamed(folder: Path) -> list[Path]:
    """Return checkpoints that were renamed: folders with a manifest and tensors."""
    if not folder.is_dir():
        return []
    return [
        path
        for path in sorted(folder.iterdir())
        if not is_checkpoint_name(path) and not path.name.startswith(".")
        if (path / MANIFEST).is_file() and any((*path.glob("*.safetensors"), *path.glob("*/*.safetensors")))
    ]


def _steps_in(path: Path) -> int:
    """Return the steps in a manifest; -1 if it cannot be read, so that any other checkpoint is preferred."""
    try:
        steps = json.loads((path / MANIFEST).read_bytes())["steps"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return -1
    return steps if type(steps) is int else -1

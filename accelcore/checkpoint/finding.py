"""Finding the checkpoint that a training goes on from."""

from __future__ import annotations

import json
from pathlib import Path

from accelcore.checkpoint.manifest import MANIFEST, RANK
from accelcore.checkpoint.store import Checkpoint, checkpoints, is_checkpoint_name, place_of
from accelcore.errors import CheckpointError

__all__ = ["find"]


def find(folder: Path, share: tuple[int, int] = (0, 1)) -> Checkpoint | None:
    """`folder` itself, where it is a checkpoint, or the newest in it, also where it was given another name.

    Args:
        share: which of how many ranks this is; see `Checkpoint`.

    Raises:
        CheckpointError: it is a file, or the checkpoint is damaged, or no whole one.
    """
    if (folder / MANIFEST).exists() or is_checkpoint_name(folder):
        return Checkpoint(folder, share)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(
            f"{folder} is a file",
            remedy="give the folder that checkpoints were saved to; another program's file is for trainer.load(...)",
        )
    if any(folder.glob(f"{RANK}*.safetensors")):
        raise _not_whole(folder)
    named = checkpoints(folder)
    found = {path: place_of(path)[0] for path in named[-1:]}
    found.update({path: _steps_in(path) for path in _renamed(folder)})
    return (
        Checkpoint(max(found, key=found.__getitem__), share) if found else None
    )  # of two alike, the first: the named one


def _not_whole(folder: Path) -> CheckpointError:
    """The refusal of a folder of a rank's files that no manifest speaks of."""
    if (folder.parent / MANIFEST).is_file():
        return CheckpointError(
            f"{folder} is a part of a checkpoint",
            why="several trainers were saved together",
            remedy=f"resume all of them: accelcore.Together(...).resume({str(folder.parent)!r}); or export its model: "
            f"accelcore export --trainer {folder.name} {folder.parent} FILE",
        )
    return CheckpointError(f"{folder} is a checkpoint without its {MANIFEST}", remedy="resume from another one")


def _renamed(folder: Path) -> list[Path]:
    """Checkpoints with names of others' choosing: folders with a manifest, and tensors beside it."""
    if not folder.is_dir():
        return []
    return [
        path
        for path in sorted(folder.iterdir())
        if not is_checkpoint_name(path) and not path.name.startswith(".")
        if (path / MANIFEST).is_file() and any((*path.glob("*.safetensors"), *path.glob("*/*.safetensors")))
    ]


def _steps_in(path: Path) -> int:
    """What the manifest of a checkpoint says; -1 where it cannot be read, so that any other comes first."""
    try:
        steps = json.loads((path / MANIFEST).read_bytes())["steps"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return -1
    return steps if type(steps) is int else -1

"""Export of a checkpoint's model as one file for other programs."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from accelcore.checkpoint import folders, store
from accelcore.checkpoint.manifest import MODEL, file_of
from accelcore.errors import CheckpointError
from accelcore.util.files import remedy_of_writing, replacing

__all__ = ["export"]


def export(checkpoint: str | Path, file: str | Path, *, trainer: str | None = None, best: bool = False) -> Path:
    """Write the model of a checkpoint, sharded or not, to one safetensors file.

    The names are the keys of the model's `state_dict`; tied weights are written once, under their first name. The host
    needs memory for the whole model; no device is used. The file appears when it is complete.

    Example:
        >>> path = trainer.save("outputs/run")
        >>> accelcore.checkpoint.export.export("outputs/run", "model.safetensors") == path
        True

    Args:
        checkpoint: a checkpoint, or a folder of checkpoints, of which the newest is exported.
        file: the file to write; an existing file is replaced.
        best: whether to export the checkpoint with the best metric instead of the newest.
        trainer: the trainer's name if several were saved by `Together`; None if the trainer was saved alone.

    Returns:
        The checkpoint that was exported.

    Raises:
        ConfigurationError: `file` cannot be a file.
        CheckpointError: the checkpoint is missing or damaged or has no such trainer, or the file cannot be written.
    """
    folder, target = folders.check_export(checkpoint, file)
    found = store.find(folder, best=best)
    if found is None:
        raise folders.no_checkpoint(folder, folders.SAVED)
    names = list(found.manifest["trainers"])
    if (trainer or "") not in names:
        raise CheckpointError(
            f"the checkpoint {found.path} "
            + (f"has no trainer {trainer!r}" if trainer else "holds several trainers, and none was named"),
            available=", ".join(names) or "one trainer, without a name",
            remedy=f"name the trainer: --trainer {names[0]}, or export(..., trainer={names[0]!r})"
            if names != [""]
            else "remove --trainer, or trainer= of export()",
        )
    tree = found.read(file_of(trainer or "", MODEL))
    tensors = {name: value for name, value in tree.items() if isinstance(value, Tensor)}
    distinct = {id(value): (name, value) for name, value in reversed(tensors.items())}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as new:
            store.write_tensors({name: value.contiguous() for name, value in distinct.values()}, new, {"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the model could not be written to {target}", why=str(error), remedy=remedy_of_writing(error)
        ) from error
    return found.path

"""A checkpoint's model as one file for other programs."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from accelcore.checkpoint import store
from accelcore.checkpoint.finding import find
from accelcore.errors import CheckpointError

__all__ = ["export"]


def export(checkpoint: str | Path, file: str | Path) -> Path:
    """Write the model of a checkpoint, also one that several ranks have saved in pieces, to one safetensors file.

    Names are those of the model's `state_dict`; tied weights are in it once, under their first name. It takes the
    memory of the whole model on the host, and no device. The file appears when it is complete.

    Args:
        checkpoint: a checkpoint, or a folder of them, of which the newest is taken.
        file: where to write; what is there is replaced.

    Returns:
        The checkpoint that was taken.

    Raises:
        CheckpointError: there is none, or it is damaged; the file cannot be written.
    """
    found, target = find(Path(checkpoint)), Path(file)
    if found is None:
        raise CheckpointError(f"there is no checkpoint in {checkpoint}", remedy="give the folder that trainer.save had")
    tensors = {name: value for name, value in found.part("model").items() if isinstance(value, Tensor)}
    distinct = {id(value): (name, value) for name, value in reversed(tensors.items())}
    beside = target.with_name(f".{target.name}.incomplete")
    with store.writing(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in distinct.values()}, beside, metadata={"format": "pt"})
        beside.replace(target)
    return found.path

"""A checkpoint's model as one file for other programs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from accelcore.checkpoint import store
from accelcore.checkpoint.finding import find
from accelcore.checkpoint.manifest import MODEL, file_of
from accelcore.errors import CheckpointError, ConfigurationError

__all__ = ["export"]


def export(checkpoint: str | Path, file: str | Path, *, trainer: str | None = None) -> Path:
    """Write the model of a checkpoint, also one that several ranks have saved in pieces, to one safetensors file.

    Names are those of the model's `state_dict`; tied weights are in it once, under their first name. It takes the
    memory of the whole model on the host, and no device. The file appears when it is complete.

    Args:
        checkpoint: a checkpoint, or a folder of them, of which the newest is taken.
        file: where to write; what is there is replaced.
        trainer: whose model, by the name that it has in the `Together` that saved it; None where it was saved alone.

    Returns:
        The checkpoint that was taken.

    Raises:
        ConfigurationError: `file` cannot be the name of one.
        CheckpointError: there is none, or it is damaged, or has no such trainer; the file cannot be written.
    """
    found, target = find(Path(checkpoint)), Path(file)
    _check_target(target)
    if found is None:
        raise CheckpointError(
            f"there is no checkpoint in {Path(checkpoint)}", remedy="give the folder that trainer.save had"
        )
    part = file_of(_checked(trainer or "", found), MODEL)
    tensors = {name: value for name, value in found.part(part).items() if isinstance(value, Tensor)}
    distinct = {id(value): (name, value) for name, value in reversed(tensors.items())}
    beside = target.with_name(f".{target.name}.incomplete")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        store.write_tensors({name: value.contiguous() for name, value in distinct.values()}, beside, {"format": "pt"})
        beside.replace(target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the model could not be written to {target}",
            why=str(error),
            remedy="make room, or see that the folder may be written to",
        ) from error
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
    return found.path


def _check_target(target: Path) -> None:
    if target.is_dir():
        raise ConfigurationError(f"{target} is a folder", remedy=f"name a file in it: {target / 'model.safetensors'}")
    if target.exists() and not target.is_file():
        raise ConfigurationError(f"{target} is no file that can be replaced", remedy="name another")
    above = next(folder for folder in target.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ConfigurationError(f"{above} is a file, and {target} would be in it", remedy="name a file in a folder")


def _checked(trainer: str, checkpoint: store.Checkpoint) -> str:
    """The name of a trainer, where the checkpoint has it; "" is the only one's."""
    names = list(checkpoint.manifest["trainers"])
    if trainer in names:
        return trainer
    if names == [""]:
        raise CheckpointError(
            f"the checkpoint {checkpoint.path} has no trainer {trainer!r}: it holds one trainer, without a name",
            remedy="leave --trainer out; of export(), trainer=",
        )
    asked = f"none of them is {trainer!r}" if trainer else "none was named"
    raise CheckpointError(
        f"the checkpoint {checkpoint.path} holds several trainers, and {asked}",
        available=", ".join(names),
        remedy=f"say whose model to take: --trainer {names[0]}, or export(..., trainer={names[0]!r})",
    )

"""What a checkpoint holds of one trainer: the files it is in."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelcore.checkpoint.manifest import MODEL, file_of
from accelcore.checkpoint.store import Checkpoint
from accelcore.checkpoint.tensors import Layout
from accelcore.errors import CheckpointError
from accelcore.roles.collectives import Collectives
from accelcore.training.parts.part import Saved, table

__all__ = ["SHARED", "of_rank", "read_saved"]

logger = logging.getLogger("accelcore")

SHARED = "training"
"""The file of what all ranks have in common beside the model."""

_OF_OPTIMIZER, _OF_MASTERS = ("optimizer.state.", "updates."), "masters."


def of_rank(rank: int) -> str:
    """The file of what is a rank's own."""
    return f"rank-{rank:05d}"


def read_saved(checkpoint: Checkpoint, trainer: str, collectives: Collectives, sharded: Mapping[str, Tensor]) -> Saved:
    """What a checkpoint holds of one trainer, as far as this rank needs it.

    Args:
        trainer: its name; "" where it was saved alone.
        sharded: by name, the parameters that are divided among the ranks.

    Raises:
        CheckpointError: it is not of a checkpoint's form; or another number of ranks saved it in mid-epoch.
    """
    saved_by = checkpoint.manifest["world_size"]
    same_job = saved_by == collectives.world_size
    layout = partial(_layout, sharded)
    model = table(checkpoint.part(file_of(trainer, MODEL), layout), "model")
    shared = table(checkpoint.part(file_of(trainer, SHARED), layout), "training state")
    own = table(checkpoint.part(file_of(trainer, of_rank(collectives.rank if same_job else 0))), "state of this rank")
    if "state" not in (optimizer := table(shared.get("optimizer"), "optimizer state")):
        optimizer["state"] = _of_all_ranks(checkpoint, trainer, saved_by, layout)
    if not same_job:
        positions = table(own.get("feeds"), "places in the data").values()
        within = table(own.get("window"), "window", "micro")["micro"]
        if within or any(table(position, "place", "taken")["taken"] for position in positions):
            raise CheckpointError(
                f"the checkpoint was saved in mid-epoch by a job of {saved_by}, this is a job of "
                f"{collectives.world_size}",
                why="the part of the data that was seen cannot be shared out among another number of ranks",
                remedy=f"resume in a job of {saved_by}, or from a checkpoint saved at the end of an epoch",
            )
        if collectives.rank == 0:
            logger.warning(
                "the checkpoint was saved by a job of %d, this is a job of %d: random states are not restored",
                saved_by,
                collectives.world_size,
            )
    return Saved(model, shared, own, same_job)


def _of_all_ranks(checkpoint: Checkpoint, trainer: str, count: int, layout: Layout) -> dict[str, Any]:
    """The optimizer's state of what each rank has updated, put together."""
    state: dict[str, Any] = {}
    for rank in range(count):
        saved = table(checkpoint.part(file_of(trainer, of_rank(rank)), layout), "state of a rank")
        state |= table(saved.get("updates"), "optimizer state of a rank")
    return state


def _layout(sharded: Mapping[str, Tensor], name: str, shape: torch.Size) -> Tensor | None:
    """The parameter that a stored tensor belongs to, where that is divided and the tensor is of its shape."""
    for prefix in _OF_OPTIMIZER:
        if name.startswith(prefix):
            name = name.removeprefix(prefix).rpartition(".")[0]
    parameter = sharded.get(name.removeprefix(_OF_MASTERS))
    return parameter if parameter is not None and parameter.shape == shape else None

"""Extract the loss and the auxiliary outputs from what a model or a loss function returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from accelcore.errors import TrainingError
from accelcore.util.text import kind_of

__all__ = ["loss_of_model", "no_loss", "split_loss"]

_FORMS = 'a scalar tensor, (scalar, aux), an object with `.loss`, or a dict with "loss"'


def loss_of_model(model: Callable[..., Any], batch: Any) -> Any:
    """Call a model that computes its loss itself. Of a longer tuple, the first item is the loss, the rest is aux."""
    if isinstance(batch, Mapping):
        returned = model(**batch)
    elif isinstance(batch, list | tuple):
        returned = model(*batch)
    else:
        returned = model(batch)
    return (returned[0], returned[1:]) if type(returned) is tuple and len(returned) > 2 else returned


def split_loss(returned: Any) -> tuple[Any, Any]:
    """Return the loss and the auxiliary outputs: the second of a pair, or the object or dict that holds the loss."""
    if type(returned) is tuple:
        if len(returned) != 2:
            raise TrainingError(f"the loss is a tuple of {len(returned)}", remedy=f"return {_FORMS}")
        return returned[0], returned[1]
    if isinstance(returned, Mapping) and "loss" in returned:
        loss = returned["loss"]
    elif hasattr(returned, "loss"):
        loss = returned.loss
    else:
        return returned, None
    if loss is None:
        raise TrainingError(
            f"the {type(returned).__name__} that was returned has a loss of None",
            why="such a model computes its loss only if the batch has labels",
            remedy="put the labels into the batch",
        )
    return loss, returned


def no_loss(loss: object) -> TrainingError:
    """Return the error for a value that backward cannot start from."""
    if not isinstance(loss, Tensor):
        return TrainingError(f"the loss is {kind_of(loss)}, not a tensor", remedy=f"return {_FORMS}")
    if loss.numel() != 1:
        return TrainingError(
            f"the loss has shape {tuple(loss.shape)}, but it must be a scalar",
            remedy="reduce it by loss.mean() or loss.sum()",
        )
    return TrainingError(
        "the loss depends on no trained parameter",
        remedy="look for torch.no_grad(), detach() or frozen parameters between the parameters and the loss",
    )

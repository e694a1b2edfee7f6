"""The loss in what a model, or a loss of the script's own, has returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from accelcore.errors import TrainingError
from accelcore.wording import kind_of

__all__ = ["loss_of_model", "no_loss", "split_loss"]

_FORMS = 'a scalar tensor, (scalar, aux), an object with `.loss`, or a dict with "loss"'


def loss_of_model(model: Callable[..., Any], batch: Any) -> Any:
    """What the model itself returns for a batch; of a tuple the first is the loss, and the others come beside it."""
    if isinstance(batch, Mapping):
        returned = model(**batch)
    elif isinstance(batch, list | tuple):
        returned = model(*batch)
    else:
        returned = model(batch)
    return (returned[0], returned[1:]) if type(returned) is tuple and len(returned) > 2 else returned


def split_loss(returned: Any) -> tuple[Any, Any]:
    """The loss, and what came beside it: the object or dict that it is in, or the second of a pair.

    Raises:
        TrainingError: it is in none of these.
    """
    if type(returned) is tuple:
        if len(returned) != 2:
            raise TrainingError(f"the loss is a tuple of {len(returned)}", remedy=f"return {_FORMS}")
        loss, aux = returned
        return loss, aux
    if isinstance(returned, Mapping) and "loss" in returned:
        loss = returned["loss"]
    elif hasattr(returned, "loss"):
        loss = returned.loss
    else:
        return returned, None
    if loss is None:
        raise TrainingError(
            f"the {type(returned).__name__} that was returned has a loss of None",
            why="a model computes its loss where the batch brings what it has to be compared with",
            remedy="put the labels into the batch",
        )
    return loss, returned


def no_loss(loss: object) -> TrainingError:
    """What to raise for something that backward cannot start from."""
    if not isinstance(loss, Tensor):
        return TrainingError(f"the loss is {kind_of(loss)}, not a tensor", remedy=f"return {_FORMS}")
    if loss.numel() != 1:
        return TrainingError(
            f"the loss has shape {tuple(loss.shape)}, not a scalar's",
            remedy="reduce it, with loss.mean() or loss.sum()",
        )
    return TrainingError(
        "the loss depends on no parameter that is trained",
        remedy="look for torch.no_grad(), detach() or frozen parameters on its way",
    )

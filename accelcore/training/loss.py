"""The loss of a training: a function of the script or the model itself, and what it may return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accelcore.errors import ConfigurationError, TrainingError
from accelcore.scaling.contract import MARK
from accelcore.util.text import bound, kind_of

_EXAMPLE = "pass loss=lambda model, batch: criterion(model(batch[0]), batch[1])"
_FORMS = 'a scalar tensor, (scalar, aux), an object with `.loss`, or a dict with "loss"'


def check_loss(loss: Any, model: nn.Module) -> None:
    """Raise ConfigurationError if `loss` is not a function of a model and a batch."""
    function = loss.forward if isinstance(loss, nn.Module) else loss
    if loss is None:
        return
    taken = None if _is_torchs(loss) else bound(function, model, None)
    if taken is None or list(taken.arguments)[1:] == ["model"]:  # such as lambda batch, model: ...
        name = repr(loss) if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
        raise ConfigurationError(f"loss={name} does not take a model and a batch, in this order", remedy=_EXAMPLE)


class LossOfModel:
    """Loss of a model that computes it itself. Of a longer tuple, the first item is the loss, the rest is aux."""

    def __init__(self, model: nn.Module) -> None:
        self._forward = model.forward

    def __call__(self, model: Callable[..., Any], batch: Any) -> Any:
        named: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {}
        listed = () if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else (batch,)
        try:
            returned = model(*listed, **named)
        except TypeError as error:
            if bound(self._forward, *listed, **named) is not None:
                raise
            raise _no_loss_given(f"the model cannot be called with this batch: {error}") from error
        if isinstance(returned, Tensor) and returned.numel() != 1:
            raise _no_loss_given(f"the model returned a tensor of shape {tuple(returned.shape)}, not a scalar")
        return (returned[0], returned[1:]) if type(returned) is tuple and len(returned) > 2 else returned


def _no_loss_given(what: str) -> TrainingError:
    return TrainingError(
        what,
        why="loss= was not given to accel.trainer(...), so the model gets the batch and has to return its loss",
        remedy=f'{_EXAMPLE}. If the batch is a dict, rename these items; or use batch["x"] in this function',
    )


def split_loss(returned: Any) -> tuple[Any, Any]:
    """Return the loss and the auxiliary outputs: the second of a pair, or the object or dict that holds the loss."""
    if type(returned) is tuple:
        if len(returned) != 2:
            raise TrainingError(f"the loss is a tuple of {len(returned)}", remedy=f"return {_FORMS}")
        return returned[0], returned[1]
    if isinstance(returned, Mapping) and "loss" in returned:
        loss = returned["loss"]
    elif isinstance(returned, Mapping) or hasattr(returned, "loss"):
        loss = getattr(returned, "loss", None)
    else:
        return returned, None
    if loss is None:
        raise TrainingError(
            f'the {type(returned).__name__} that was returned has no "loss", or None',
            why="many models compute it only if the batch has labels",
            available=", ".join(map(repr, returned)) if isinstance(returned, Mapping) else "",
            remedy=f"put the labels into the batch, or return {_FORMS}",
        )
    return loss, returned


def _refuse_backward(*_: Any, **__: Any) -> None:
    raise TrainingError(
        "backward was called on the loss that trainer(batch) returned",
        why="trainer(batch) has called backward already, and updates the parameters at the end of each window",
        remedy="remove .backward(); for a loss of your own call trainer.backward(loss) and trainer.update()",
    )


def without_backward(loss: Tensor) -> Tensor:
    """Let `loss.backward()` raise TrainingError. What is computed from the loss, or read from a file, is plain."""
    # torch and pickle ask `__getstate__` for the attributes to save: none, so that the loss is saved as a plain tensor.
    loss.__dict__.update(backward=_refuse_backward, __getstate__=dict)
    return loss


def unusable_loss(loss: object) -> TrainingError:
    """Return the error for a value that backward cannot start from."""
    if not isinstance(loss, Tensor):
        return TrainingError(f"the loss is {kind_of(loss)}, not a tensor", remedy=f"return {_FORMS}, without .item()")
    if loss.numel() != 1:
        return TrainingError(
            f"the loss has shape {tuple(loss.shape)}, and must be a scalar",
            remedy="use loss.mean(); of two values that are returned, the first is the loss",
        )
    if MARK in loss.__dict__:
        return TrainingError(
            "the loss is scaled by scaler.scale(loss)",
            why="the trainer scales the loss and unscales the gradients itself, and would not unscale these",
            remedy='give it the loss without scaler.scale(); precision="fp16" or loss_scale= sets a loss scale',
        )
    if not (loss.is_floating_point() or loss.is_complex()):
        return TrainingError(
            f"the loss is {loss.dtype}, and whole numbers have no gradient",
            remedy="return a loss such as a cross-entropy; a number of errors cannot be trained",
        )
    off = "" if torch.is_grad_enabled() else ", because gradients are off where the trainer is called"
    return TrainingError(
        f"the loss depends on no trained parameter{off}",
        remedy="look for torch.no_grad(), detach() or frozen parameters between the parameters and the loss; and for a "
        "loop over trainer.evaluate(loader) around this call, or one that was left by break and kept in a variable",
    )


def _is_torchs(loss: Any) -> bool:
    """Return whether `loss` is a loss class, instance or function of torch, which takes outputs and targets."""
    home = loss if inspect.isclass(loss) or inspect.isroutine(loss) else type(loss)
    return str(getattr(home, "__module__", "")).partition(".")[0] == "torch"

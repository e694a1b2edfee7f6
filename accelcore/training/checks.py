"""What a trainer refuses: before anything is moved, wrapped or captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accelcore.errors import ConfigurationError, TrainingError, UnsupportedError

if TYPE_CHECKING:
    from accelcore.backend import Backend

__all__ = ["check_arguments", "check_declared", "no_loss"]


def check_arguments(
    model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None, accumulate: int, clip_norm: float | None
) -> None:
    """Raise ConfigurationError for arguments that contradict each other."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ConfigurationError(
            f"the model is already wrapped in {type(model).__name__}",
            remedy='give the bare module and say parallel="ddp"',
        )
    names = {id(parameter) for parameter in model.parameters()}
    strangers = sum(id(parameter) not in names for group in optimizer.param_groups for parameter in group["params"])
    if strangers:
        raise ConfigurationError(
            f"{strangers} of the optimizer's parameters are not in the model",
            why="they would be neither moved to the device, nor reduced over ranks, nor saved",
            remedy="make the optimizer from model.parameters(), and make what else is trained a submodule",
        )
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigurationError(f"accumulate={accumulate!r} makes no sense", remedy="give a whole number, 1 or more")
    if clip_norm is not None and (not isinstance(clip_norm, int | float) or not clip_norm > 0):
        raise ConfigurationError(f"clip_norm={clip_norm!r} makes no sense", remedy="give a number > 0, or None")
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigurationError("the scheduler is another optimizer's", remedy="make it from the optimizer given here")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigurationError(
            "ReduceLROnPlateau needs a metric, which the trainer does not have",
            remedy="leave it out here and call scheduler.step(metric) yourself",
        )


def check_declared(backend: Backend, model: nn.Module, compile: object, graph: bool) -> None:
    """Raise UnsupportedError for what the backend does not declare."""
    declared = backend.capabilities
    for name, parameter in model.named_parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        if parameter.is_floating_point() and dtype not in declared.model_dtypes:
            raise UnsupportedError(
                f"the parameter {name} is {dtype}, which {backend.name} does not train",
                available=", ".join(declared.model_dtypes),
                remedy='keep the parameters in fp32 and say precision="bf16" or "fp16"',
            )
    if not isinstance(compile, bool | Mapping):
        raise ConfigurationError(
            f"compile={compile!r} makes no sense", available='True, False, or options such as {"mode": "max-autotune"}'
        )
    if graph and not declared.graphs:
        raise UnsupportedError(f"{backend.name} declares no graphs", remedy="leave graph out")
    if compile is not False and not declared.compilers:
        raise UnsupportedError(f"{backend.name} declares no compiler", remedy="leave compile out")


def no_loss(loss: object) -> TrainingError:
    """What to raise for something that backward cannot start from."""
    if not isinstance(loss, Tensor):
        return TrainingError(
            f"the loss is a {type(loss).__name__}, not a tensor",
            remedy="return a scalar tensor, or (scalar, aux), from loss(model, batch) or from the model",
        )
    if loss.numel() != 1:
        return TrainingError(
            f"the loss has shape {tuple(loss.shape)}, not a scalar's",
            remedy="reduce it, with loss.mean() or loss.sum()",
        )
    return TrainingError(
        "the loss depends on no parameter that is trained",
        remedy="look for torch.no_grad(), detach() or frozen parameters on its way",
    )

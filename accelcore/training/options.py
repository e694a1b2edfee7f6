"""What a trainer can be asked for, written down once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accelcore.errors import ConfigurationError
from accelcore.roles.scaler import LossScale
from accelcore.training.activations import Recompute
from accelcore.training.modules import Parts, check_parts
from accelcore.training.observers import Observer
from accelcore.training.policy import Policy
from accelcore.training.schedule import ScheduleBy
from accelcore.wording import did_you_mean, is_number, is_whole, kind_of

__all__ = ["DEFAULTS", "FSDP", "Loss", "TrainerOptions", "Weight", "check_arguments", "check_values", "complete"]

Loss = Callable[[Any, Any], Any]
Weight = Callable[[Any], "float | Tensor"]


@dataclass(frozen=True)
class FSDP:
    """Options of `parallel=FSDP(...)`: torch's `fully_shard` divides parameters, gradients and optimizer state.

    The parameters of a *group* are gathered and freed together. Each module that `wrap` chooses is a group; the rest of
    the model is one more. A module that shares a parameter with the rest of the model belongs to the rest. All ranks
    must run a group, or none; otherwise they deadlock.

    Attributes:
        wrap: the modules that are groups: a type of module, a tuple of types, or a function of a module that returns
            True. None: the items of each `nn.ModuleList`, such as the blocks of a transformer.
        reshard_after_forward: True: a group is freed after its forward pass, and gathered again for its backward pass
            (ZeRO-3). False: it stays gathered until then (ZeRO-2). The group of the model itself always stays.
        cpu_offload: whether shards, gradients and optimizer state stay in host memory; the optimizer then runs there.

    Raises:
        ConfigurationError: `wrap` is not a choice of modules, or another option is not a bool.
    """

    wrap: Parts | None = None
    reshard_after_forward: bool = True
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        if self.wrap is not None:
            check_parts(self.wrap, "wrap")
        for name in ("reshard_after_forward", "cpu_offload"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name}={getattr(self, name)!r} is not True or False")


class TrainerOptions(TypedDict, total=False):
    """The options of `accel.trainer(model, optimizer, ...)`. Every one may be left out.

    Attributes:
        loss: `loss(model, batch)` returns a scalar, `(scalar, aux)`, or an object with `.loss` or a dict with "loss",
            which is then `aux`; `model` is the one to call, prepared for this device. None: the model itself returns
            that, or a tuple whose first is the loss, called as `model(**batch)` for a mapping, `model(*batch)` for a
            list or tuple, else `model(batch)`.
        scheduler: of the learning rate, one of torch's; saved and restored with the rest.
        schedule_by: when the scheduler is stepped. `"window"`: after each update, also one that is skipped for
            overflow. `"epoch"`: after each epoch of `trainer.batches(loader)`. `"script"`: when the script calls
            `scheduler.step()` itself, as ReduceLROnPlateau has to be with its metric; under the other two a script
            that does so is stopped.
        precision: `"fp32"`, `"bf16"`, `"fp16"`, one of apex's levels `"O0"` to `"O3"` (see `Policy.preset`), or a
            `Policy`. `"best"` is the fastest that the device has units for. torch's, accelerate's and Lightning's words
            are taken, too.
        loss_scale: a number for a static scale, `"dynamic"`, a `LossScale` for a dynamic one with settings of your own,
            None for the precision's own.
        fp32: how fp32 matrix products are computed during steps: `"ieee"`; `"fast"`, as the backend's `fast_fp32` says;
            `"fast if possible"`, which is that where it is declared, and else nothing; None for torch's own setting.
        accumulate: micro-batches an update; their losses are averaged.
        weight: `weight(batch)` is over how many examples or tokens a micro-batch's loss is a mean, as a number or a
            scalar tensor. The gradients of a window are then those of the mean over all of them, on all ranks. None
            lets each micro-batch count alike.
        clip_norm: largest 2-norm of all gradients together, as torch's `clip_grad_norm_`; None clips nothing.
        clip: `clip(parameters)` changes gradients in place before the update, in another way: by
            `torch.nn.utils.clip_grad_value_(parameters, 1.0)`, adaptively, ... It is given what has a gradient, reduced
            over ranks and unscaled; in place of parameters in low precision their fp32 masters.
        parallel: `"none"`, or a strategy that the backend declares, such as `"ddp"`, `"combine_ddp"`, `"zero1"` or
            `"fsdp"`, or `FSDP(...)`, which is `"fsdp"` with settings of your own; in a job of one process all are the
            same. None: `"none"`, unless a launcher started several ranks; then it has to be said.
        comm_dtype: dtype in which `"combine_ddp"`, `"zero1"` and `"fsdp"` add up gradients over ranks, by torch's name;
            None for their own, and for fp32 where low precision is computed in that has fp32 shards.
        sync_batchnorm: whether each BatchNorm takes the statistics of all ranks' rows, by torch's SyncBatchNorm, which
            takes its place in the model; where the backend declares it. In a job of one process it does nothing.
        checkpoint: the parts of the model that keep only what they were given, and are computed anew in backward: the
            modules of a type, or of a tuple of types, or those for which a function returns True;
            `Recompute(parts, save=[...])` also keeps the results of some operators. Random numbers and running
            statistics are those of the first time.
        offload: the parts whose activations wait for their backward pass in pinned memory of the host, chosen
            likewise; for a part that is in both, that is what it was given.
        flat: whether parameters and gradients are laid into one piece of memory each; None: where that is faster.
        compile: True, or options for the compiler.
        graph: capture whole steps and launch each as one, which pays where a step is many short operators. For
            `trainer(batch)` on one rank, with a few shapes of batch. After three eager windows each shape of batch is
            captured when it comes for the second time; `aux` is then memory that the next step overwrites. With a
            dynamic loss scale the optimizer must be one whose kernel skips an overflowed step by itself.
        observers: told of losses, gradient norms, overflows, module outputs.
    """

    loss: Loss | None
    scheduler: LRScheduler | None
    schedule_by: ScheduleBy
    precision: str | int | torch.dtype | Policy
    loss_scale: float | str | LossScale | None
    fp32: str | None
    accumulate: int
    weight: Weight | None
    clip_norm: float | None
    clip: Callable[[list[Tensor]], object] | None
    parallel: str | FSDP | None
    comm_dtype: str | None
    sync_batchnorm: bool
    checkpoint: Parts | Recompute | None
    offload: Parts | None
    flat: bool | None
    compile: bool | Mapping[str, Any]
    graph: bool
    observers: Sequence[Observer]


DEFAULTS: TrainerOptions = {
    "loss": None,
    "scheduler": None,
    "schedule_by": "window",
    "precision": "fp32",
    "loss_scale": None,
    "fp32": None,
    "accumulate": 1,
    "weight": None,
    "clip_norm": None,
    "clip": None,
    "parallel": None,
    "comm_dtype": None,
    "sync_batchnorm": False,
    "checkpoint": None,
    "offload": None,
    "flat": None,
    "compile": False,
    "graph": False,
    "observers": (),
}
"""What an option is where it is left out."""


def complete(given: Mapping[str, Any]) -> TrainerOptions:
    """All options: those given, and the others' defaults.

    Raises:
        ConfigurationError: one is not an option of a trainer.
    """
    for name in given:
        if name not in DEFAULTS:
            raise ConfigurationError(
                f"a trainer has no option {name!r}",
                available=", ".join(DEFAULTS),
                remedy=did_you_mean(name, DEFAULTS),
            )
    options: TrainerOptions = {**DEFAULTS, **given}  # type: ignore[typeddict-item]  # checked above
    return options


def check_values(options: TrainerOptions) -> None:
    """Raise ConfigurationError for numbers and functions that are none, and observers that are no list."""
    accumulate, clip_norm = options["accumulate"], options["clip_norm"]
    weight, observers = options["weight"], options["observers"]
    if not is_whole(accumulate, 1):
        raise ConfigurationError(
            f"accumulate={accumulate!r} is not a number of micro-batches", remedy="give a whole number, 1 or more"
        )
    if clip_norm is not None and not (is_number(clip_norm) and clip_norm > 0):
        raise ConfigurationError(f"clip_norm={clip_norm!r} is not a norm", remedy="give a number > 0, or None")
    clip = options["clip"]
    if clip is not None and not callable(clip):
        raise ConfigurationError(
            f"clip={clip!r} is no function",
            remedy=f"say clip_norm={clip!r}, or clip=lambda parameters: torch.nn.utils.clip_grad_value_(parameters, "
            f"{clip!r})",
        )
    if weight is not None and not callable(weight):
        raise ConfigurationError(
            f"weight={weight!r} is no function", remedy="say weight=lambda batch: len(batch[0]), or leave it out"
        )
    if not isinstance(observers, Sequence):  # it is gone through more than once
        raise ConfigurationError(f"observers={observers!r} is no list", remedy="say observers=[...]")
    if clip is not None and clip_norm is not None:
        raise ConfigurationError("clip= and clip_norm= together", remedy="give one of them")


def check_arguments(model: Any, optimizer: Any, loss: Any) -> None:
    """Raise ConfigurationError for a first argument that is no model, a second that is no optimizer, a wrong loss."""
    if isinstance(model, list | tuple | Mapping) and not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"a trainer trains one model, and was given {kind_of(model)} of {len(model)}",
            remedy="make a trainer for each, with an optimizer of its own; or one nn.Module that holds them, such as "
            "nn.ModuleList, where one loss trains all",
        )
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"the model is {_shown(model)}, not an nn.Module", remedy=_order(optimizer, model))
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(f"the optimizer is {_shown(optimizer)}, not an optimizer", remedy=_made(optimizer))
    if loss is not None and (not callable(loss) or _is_torchs(loss)):
        name = getattr(loss, "__name__", type(loss).__name__)
        raise ConfigurationError(
            f"loss={name} does not take a model and a batch",
            why="the trainer calls loss(model, batch), with the model that is prepared for this device",
            remedy="say loss=lambda model, batch: criterion(model(batch[0]), batch[1])",
        )


def _order(optimizer: Any, model: Any) -> str:
    if isinstance(model, Optimizer) and isinstance(optimizer, nn.Module):
        return "give the model first: accel.trainer(model, optimizer)"
    return "make it first" if isinstance(model, type) else "give the module whose parameters the optimizer has"


def _made(optimizer: Any) -> str:
    if isinstance(optimizer, list | tuple):
        return "make one optimizer of several parameter groups, or a trainer for each model with its own"
    name = optimizer if isinstance(optimizer, str) else "adamw"
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        return f"make it: {optimizer.__name__}(model.parameters(), lr=...)"
    return f'make it: accel.optimizers.create("{name}", model.parameters(), lr=...)'


def _is_torchs(loss: Any) -> bool:
    """Whether this is one of torch's losses, a class of them, or a function: they take what a model has computed."""
    home = loss if inspect.isclass(loss) or inspect.isroutine(loss) else type(loss)
    return str(getattr(home, "__module__", "")).partition(".")[0] == "torch"


def _shown(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else kind_of(value)

"""Options of a trainer, their defaults and checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accelcore.errors import ConfigurationError, Once, Settings, check_names
from accelcore.precision.policy import Fp32Mode, Policy, PrecisionWord
from accelcore.scaling.dynamic import LossScale
from accelcore.torch_internals import OpOverload, uncompiled
from accelcore.training.observers import Observer
from accelcore.training.schedule import ScheduleBy
from accelcore.util.text import bound, is_number, is_whole, kind_of, text_remedy

Loss = Callable[[Any, Any], Any]
Weight = Callable[[Any], "float | Tensor"]
Parts = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]
"""Modules of one or several types, or those for which a function returns True."""


@dataclass(frozen=True)
class FSDP(Settings):
    """Options of `parallel=FSDP(...)`: torch's `fully_shard` divides parameters, gradients and optimizer state.

    The parameters of a *group* are gathered and freed together. Each module that `wrap` chooses is a group; the rest of
    the model is one more. A module that shares a parameter with the rest of the model belongs to the rest. In each
    step, a group must run on all ranks or on none: if it runs on some, these wait for the others forever.

    Example:
        >>> sharding = accelcore.FSDP(wrap=torch.nn.TransformerEncoderLayer)
        >>> trainer = accel.trainer(model, optimizer, loss=loss, parallel=sharding)

    Attributes:
        wrap: the modules that are groups: a type of module, a tuple of types, or a function of a module that returns
            True. None: the items of each `nn.ModuleList`, such as the blocks of a transformer.
        reshard_after_forward: whether a group is freed after its forward pass, and gathered again for its backward pass
            (ZeRO-3), or stays gathered until then (ZeRO-2). The group of the model itself always stays.
        cpu_offload: whether shards, gradients and optimizer state stay in host memory; the optimizer then runs there.
    """

    wrap: Parts | None = None
    reshard_after_forward: bool = True
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        if self.wrap is not None:
            check_parts(self.wrap, "wrap")


@dataclass(frozen=True)
class Recompute(Settings):
    """Activation checkpointing that keeps the results of some operators.

    Example:
        >>> parts = accelcore.Recompute(torch.nn.Linear, save=[torch.ops.aten.mm.default])
        >>> trainer = accel.trainer(model, optimizer, loss=loss, checkpoint=parts)

    Attributes:
        parts: the modules to recompute, as for `checkpoint=` of a trainer.
        save: operators to keep the results of: `[torch.ops.aten.mm.default]` keeps matrix products.
    """

    parts: Parts
    save: Sequence[OpOverload] = ()

    def __post_init__(self) -> None:
        check_parts(self.parts, "parts")


class TrainerOptions(TypedDict, total=False):
    """Options of `accel.trainer(model, optimizer, ...)`. All are optional; the default is None if no other is named.

    `print(accelcore.TrainerOptions.__doc__)` shows this text; `help()` also lists the methods that every dict has.

    Attributes:
        loss: `loss(model, batch)` returns a scalar, `(scalar, aux)`, an object with `.loss`, or a dict with "loss"; the
            object or dict is then `aux`. `model` is the one that was prepared for this device. None: the model itself
            returns this, or a tuple that begins with the loss. It is called as `model(**batch)` for a mapping,
            `model(*batch)` for a list or tuple, else `model(batch)`.
        scheduler: a learning rate scheduler of torch; or `"constant"`, `"cosine"` or `"linear"`, of which the last two
            fall to 0; or a function of the optimizer and the number of updates that returns a scheduler. A name or a
            function needs the number of updates: from `total_steps`, or from `trainer.epochs(n)` and the length of
            the loader.
        warmup: updates in which the learning rate first rises linearly to its value: a number, or a share of all
            updates, such as 0.05. For a `scheduler` by name. Default: `0`.
        total_steps: number of updates of the whole training, for a scheduler or observers, such as `Progress`. It does
            not end the training. None: computed from `trainer.epochs(n)` and the loader.
        schedule_by: when the scheduler is stepped. `"window"`: after each update, even if it was skipped for overflow.
            `"script"`: the script calls `scheduler.step()`, such as after each epoch, or with a metric for
            ReduceLROnPlateau. Under `"window"` a script that does so gets an error. A scheduler made for epochs, such
            as `StepLR(optimizer, 10)`, needs `"script"`: under `"window"` its 10 are updates. None, the default, is
            `"window"`, and warns of a scheduler that seems to be made for another number of steps.
        precision: `"fp32"`, the default; `"bf16"`, `"fp16"`, one of apex's levels `"O0"` to `"O3"` (see
            `Policy.preset`), or a `Policy`. `"best"` is the fastest that the hardware supports. The words of torch,
            accelerate and Lightning work, too.
        loss_scale: a number for a static scale, `"dynamic"`, or a `LossScale` for a dynamic scale with other settings;
            None for the default of the precision.
        fp32: how fp32 matrix products are computed during steps. `"ieee"`: exactly. `"fast"`: as the backend's
            `fast_fp32` declares. `"fast if possible"`: fast if the backend declares it. None: torch's own setting.
        accumulate: micro-batches of a window; their losses are averaged. Default: `1`.
        weight: `weight(batch)` returns the number of examples or tokens of which a micro-batch's loss is the mean, as a
            number or a scalar tensor. The gradients of a window are then those of the mean over all examples, on all
            ranks. They are 0 if all weights are 0. None: every micro-batch counts alike.
        clip_norm: largest 2-norm of all gradients together, as in torch's `clip_grad_norm_`; None clips nothing.
        clip: `clip(parameters)` clips gradients in place in another way, such as
            `torch.nn.utils.clip_grad_value_(parameters, 1.0)`. It gets the parameters that have a gradient, reduced
            over ranks and unscaled, or their fp32 masters.
        on_nonfinite: what to do about NaN and inf. `"raise"`, the default: look at the parameters in the first windows,
            in every 64th, at the end of an epoch and in `save`, and raise TrainingError if one is not finite. `"skip"`:
            also skip an update if a gradient is not finite. None: do not look.
        parallel: `"none"`, a strategy that the backend declares, such as `"ddp"`, `"combine_ddp"`, `"zero1"` or
            `"fsdp"`, or `FSDP(...)` for `"fsdp"` with other settings. In a job of one process all are the same. None,
            the default, is `"none"` in one process, and an error in a job of several ranks.
        comm_dtype: dtype in which `"combine_ddp"`, `"zero1"` and `"fsdp"` add gradients over ranks, by torch's name.
            None: the gradients' own, or fp32 if shards are fp32 and computed in low precision.
        checkpoint: the parts of the model that keep only their inputs, and are computed again in backward: modules of
            one or several types, or those for which a function returns True. `Recompute(parts, save=[...])` also keeps
            the results of some operators. It draws the same random numbers again, and changes no running statistics.
        offload: the parts whose activations wait for backward in pinned host memory, chosen in the same way. If a
            part is also in `checkpoint`, only its inputs wait there; the rest is computed again.
        flat: whether all parameters, and all gradients, lie in one piece of memory each. None: if that is faster here.
        compile: True, or options for the compiler. Default: `False`.
        graph: capture whole steps as graphs and launch each as one. This pays if a step is many short operators. It
            needs `trainer(batch)`, one rank, and a few shapes of batches. The next step overwrites the memory of `aux`.
            Default: `False`.
        observers: callbacks for losses, gradient norms, overflows, steps and module outputs. Default: `()`.
    """

    loss: Loss | None
    scheduler: LRScheduler | Literal["constant", "cosine", "linear"] | Callable[[Optimizer, int], LRScheduler] | None
    warmup: float
    total_steps: int | None
    schedule_by: ScheduleBy | None
    precision: PrecisionWord | torch.dtype | Policy
    loss_scale: float | Literal["dynamic"] | LossScale | None
    fp32: Fp32Mode | None
    accumulate: int
    weight: Weight | None
    clip_norm: float | None
    clip: Callable[[list[Tensor]], object] | None
    on_nonfinite: Literal["raise", "skip"] | None
    parallel: str | FSDP | None
    comm_dtype: str | None
    checkpoint: Parts | Recompute | None
    offload: Parts | None
    flat: bool | None
    compile: bool | Mapping[str, Any]
    graph: bool
    observers: Sequence[Observer]


_DEFAULTS = {
    "warmup": 0, "precision": "fp32", "accumulate": 1, "on_nonfinite": "raise", "compile": False, "graph": False,
    "observers": (),
}  # fmt: skip
"""Defaults that are not None."""

_FIXED = {"model", "optimizer", "scaler", *TrainerOptions.__annotations__}
"""Attributes of a trainer that cannot be set."""

_WORDS = {
    "mixed_precision": "precision", "amp": "precision", "max_grad_norm": "clip_norm", "gradient_clip_val": "clip_norm",
    "gradient_accumulation_steps": "accumulate", "accumulate_grad_batches": "accumulate", "strategy": "parallel",
    "use_amp": "precision", "dtype": "precision", "grad_clip": "clip_norm", "grad_accum": "accumulate",
    "criterion": "loss", "callbacks": "observers", "logger": "observers", "ddp": "parallel", "fsdp": "parallel",
    "fp16": 'write precision="fp16"', "bf16": 'write precision="bf16"', "tf32": 'write fp32="fast"',
    **dict.fromkeys(("epochs", "max_epochs", "num_epochs", "max_steps"), "write for epoch in trainer.epochs(n):"),
    **dict.fromkeys(("device", "devices"), 'choose it by accelcore.select("cpu"), or by ACCEL_DEVICE'),
    **dict.fromkeys(("lr", "learning_rate", "weight_decay"), "give it to the optimizer"),
    **dict.fromkeys(("data", "loader", "dataloader", "train_dataloader"), "give it to trainer.batches(loader)"),
}  # fmt: skip
"""Other libraries' words for options of a trainer that are not similar to ours, and what to write."""

_LOOP = "write for epoch in trainer.epochs(n): for batch in trainer.batches(loader): trainer(batch)"
HINTS = {
    **dict.fromkeys(("fit", "train"), _LOOP),
    **dict.fromkeys(("eval", "validate", "test", "predict"), "write for batch in trainer.evaluate(loader)"),
    "step": "write trainer(batch); or, in a loop of your own, trainer.backward(loss) and trainer.update()",
    "zero_grad": "remove it: each window begins without gradients",
    **dict.fromkeys(("state_dict", "save_state", "save_checkpoint"), "write trainer.save(folder)"),
    **dict.fromkeys(("load_state_dict", "load_state", "load_checkpoint"), "write trainer.resume(folder)"),
    "clip_grad_norm_": "write accel.trainer(..., clip_norm=1.0)",
    "log": 'write log = accelcore.Log("outputs"), accel.trainer(..., observers=[log]), and log.write(accuracy=0.9)',
    "global_step": "write trainer.steps",
    "current_epoch": "write trainer.epoch",
    "lr": 'write trainer.optimizer.param_groups[0]["lr"]',
    "device": "write accel.device",
}
"""What to write instead of attributes that a trainer lacks."""


def complete(given: Mapping[str, Any]) -> TrainerOptions:
    """Return all options: those given, and the defaults of the others."""
    known = TrainerOptions.__annotations__
    check_names("a trainer has no option", given, known, _WORDS)
    return cast("TrainerOptions", {**dict.fromkeys(known), **_DEFAULTS, **given})


def unwrap(model: nn.Module, options: TrainerOptions, log: Once) -> nn.Module:
    """Return the module in a model that is compiled or wrapped in DDP, and set the options to do this again.

    The names of its parameters are then the module's own. The hooks of the first DDP stay on the parameters. They do
    nothing, unless the script calls that DDP: torch then raises an error, because two wrappers reduce one gradient.
    """
    inner, said = uncompiled(model), ""
    if inner is not model and options["compile"] is False:
        options["compile"] = True
        said = 'made by torch.compile, and is compiled again for the trainer. Give options as compile={"mode": ...}'
    if inner is model and isinstance(model, nn.parallel.DistributedDataParallel):
        if options["parallel"] not in (None, "ddp"):
            raise ConfigurationError(
                f"the model is wrapped in DistributedDataParallel, and parallel={options['parallel']!r}",
                remedy="pass the bare module",
            )
        options["parallel"], inner = "ddp", model.module
        said = (
            'wrapped in DistributedDataParallel, and the trainer wraps its module again, as parallel="ddp", without '
            "the options and communication hooks of the first wrapper"
        )
    if said:
        log.warn(f"the model was {said}")
    return inner if inner is model else unwrap(inner, options, log)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "accumulate": (lambda count: is_whole(count, 1), "a number of micro-batches", "give an int, 1 or more"),
    "clip_norm": (lambda norm: is_number(norm) and norm > 0, "a norm", "give a number > 0, or None"),
    "clip": (
        lambda f: bound(f, None) is not None,
        "a function of the parameters",
        "pass a norm as clip_norm=, or clip=lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 1.0)",
    ),
    "weight": (lambda f: bound(f, None) is not None, "a function of the batch", "pass lambda batch: len(batch[0])"),
    "flat": (lambda value: isinstance(value, bool), "True or False", "give one of them, or None to choose"),
    "graph": (lambda value: isinstance(value, bool), "True or False", "give one of them"),
    "on_nonfinite": (lambda word: word in (None, "raise", "skip"), '"raise", "skip" or None', "give one of them"),
    "total_steps": (lambda count: is_whole(count, 1), "a number of updates", "give 1 or more, or None"),
    "observers": (lambda value: isinstance(value, Sequence), "a list", "pass observers=[...]"),  # it is read twice
}
"""For options: whether a value fits, what it must be, and the remedy. None fits if it is the default."""

_NUMBERS = ("accumulate", "clip_norm", "total_steps")
"""Options that are numbers, which a command line gives as text."""


def check_values(options: TrainerOptions) -> None:
    """Raise ConfigurationError for option values of the wrong type or out of range."""
    given: Mapping[str, Any] = options
    for name, (fits, kind, remedy) in _CHECKS.items():
        if not fits(given[name]) and (given[name] is not None or name in _DEFAULTS):
            remedy = (text_remedy(given[name], whole=name != "clip_norm") if name in _NUMBERS else "") or remedy
            raise ConfigurationError(f"{name}={given[name]!r} is not {kind}", remedy=remedy)
    if given["total_steps"] is not None and given["scheduler"] is None and not given["observers"]:
        raise ConfigurationError(
            f"total_steps={given['total_steps']} has no effect without a scheduler",
            remedy='give scheduler="cosine", or remove it; to end the training, break when trainer.steps reaches it',
        )
    if given["clip"] is not None and given["clip_norm"] is not None:
        raise ConfigurationError("clip= and clip_norm= were both given", remedy="give one of them")


def check_arguments(backend: Any, model: Any, optimizer: Any) -> None:
    """Raise ConfigurationError unless `model` is an nn.Module, and `optimizer` an optimizer."""
    if isinstance(backend, nn.Module):
        remedy = "make it by accel = accelcore.select(), and accel.trainer(model, optimizer, ...)"
        raise ConfigurationError("accelcore.Trainer(...) was given a model first, not a backend", remedy=remedy)
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"the model is {_shown(model)}, not an nn.Module",
            remedy="pass the model first, an instance: accel.trainer(model, optimizer). Several models need a trainer "
            "each, with an optimizer of its own; if one loss trains all of them, put them into one nn.ModuleList",
        )
    if not isinstance(optimizer, Optimizer):
        name = optimizer if isinstance(optimizer, str) else "adamw"
        made = f"{optimizer.__name__}(" if isinstance(optimizer, type) else f'accel.optimizers.create("{name}", '
        raise ConfigurationError(
            f"the optimizer is {_shown(optimizer)}, not an optimizer",
            remedy=f"make it: {made}model.parameters(), lr=...). One optimizer can have several parameter groups; "
            "several models need a trainer each",
        )
    # Of ZeroRedundancyOptimizer.
    own = "it divides the parameters among ranks itself, and does not update fp32 masters or shards"
    reason = own if hasattr(optimizer, "consolidate_state_dict") else backend.optimizers.refusal(optimizer)
    if reason is not None:
        raise ConfigurationError(
            f"a trainer cannot step a {type(optimizer).__name__}",
            why=reason,
            remedy='make one by name, which may have the same kernels: accel.optimizers.create("adamw", '
            'model.parameters(), lr=...). parallel="zero1" divides its state among ranks',
        )


def check_set(name: str) -> None:
    """Raise ConfigurationError for an attribute of a trainer that a script may try to set, and cannot."""
    if name in _FIXED:
        option = f"model, optimizer, {name}=..." if name in TrainerOptions.__annotations__ else "..."
        remedy = f"make another trainer, which keeps what it was made with: accel.trainer({option})"
        raise ConfigurationError(f"trainer.{name} cannot be set", remedy=remedy)
    if name in ("lr", "learning_rate"):
        remedy = "set the 'lr' of each group in trainer.optimizer.param_groups"
        raise ConfigurationError(f"trainer.{name} would change nothing", remedy=remedy)


def _shown(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else kind_of(value)


def check_parts(parts: object, option: str) -> None:
    """Raise ConfigurationError if the value of an option cannot choose modules."""
    kinds = parts if isinstance(parts, tuple) else (parts,)
    are_types = bool(kinds) and all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds)
    is_function = callable(parts) and not isinstance(parts, type)
    if not (are_types or is_function):
        raise ConfigurationError(
            f"{option}={parts!r} does not choose modules",
            available="a type of module, a tuple of types, a function of a module that returns True or False",
        )


def chosen(model: nn.Module, parts: Parts | None, option: str) -> list[nn.Module]:
    """Return the chosen parts of a model, outer ones first, without the model itself; None chooses its blocks."""
    if parts is None:
        return list(_blocks(model))
    check_parts(parts, option)
    inside = [module for module in model.modules() if module is not model]
    found = [each for each in inside if (isinstance(each, parts) if isinstance(parts, type | tuple) else parts(each))]
    if not found:
        raise ConfigurationError(
            f"{option}={parts!r} chooses no part of this model",
            available=", ".join(sorted({type(module).__name__ for module in inside})),
            remedy="" if inside else f"remove {option}=: this model has no parts to choose from",
        )
    return found


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the items of the outermost ModuleLists. A list itself is never called, so it cannot be a block."""
    for child in module.children():
        if isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield child
        else:
            yield from _blocks(child)

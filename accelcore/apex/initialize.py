"""`amp.initialize`: prepare models and optimizers. All arguments are checked before anything changes.

The arguments become a policy: the preset of an optimization level, with the caller's changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.apex.prepared import Prepared, is_prepared
from accelcore.apex.state import AmpScaler, backend_of, enter_o1, listed, state
from accelcore.errors import AmpError, UnsupportedError, logger
from accelcore.precision.cast_model import cast_boundary, fp32_state_dict, hold
from accelcore.precision.policy import LOW_PRECISION, Policy
from accelcore.scaling.dynamic import LossScale
from accelcore.util.text import is_whole

_LEVELS = ("O0", "O1", "O2", "O3")
_SMALLEST_SCALE = 2.0**-24  # default of the smallest scale. apex has none: an endless overflow takes its scale to 0.


@dataclass(frozen=True)
class _Properties:
    """Changes that `amp.initialize` makes to models and optimizers."""

    opt_level: str  # `"O0"` to `"O3"`
    policy: Policy  # precision and loss scale. A loss scale of None means 1.
    cast_model_outputs: torch.dtype | None  # dtype of the models' outputs; None leaves it alone
    combine_grad: bool  # whether parameters and gradients lie in one piece of memory each
    combine_ddp: bool  # whether ranks exchange gradients in `scale_loss`, instead of in a wrapper around the model


def initialize(
    models: nn.Module | Sequence[nn.Module],
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    dynamic_init_scale: float = 2.0**16,
    scale_growth_factor: float = 2.0,
    scale_backoff_factor: float = 0.5,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    combine_grad: bool | None = None,
    combine_ddp: bool | None = None,
    ddp_replica_count: int = 4,
    user_cast_preferred: bool | None = None,
    check_combined_tensors: bool | None = None,
) -> Any:
    """Prepare models and optimizers for mixed precision, on the device of the models.

    The models are changed in place: cast, with hooks on their `forward`. The optimizers get another `step` and
    `zero_grad`, and a method `clip_optimizer_grad_norm_fused(max_norm, norm_type=2)`. That method clips the unscaled
    gradients of all the optimizer's parameters together, in place, and returns their norm. At O1, this thread casts
    everything that it computes on the device, until `reset()`.

    An argument that is None keeps the level's default. O0: models in fp32, a loss scale of 1. O1: operators cast by
    table O1, dynamic scale. O2: models in fp16 except BatchNorm, fp32 masters, dynamic scale. O3: models in fp16, no
    masters, a loss scale of 1.

    Args:
        models: one, or a list; in fp32, and not yet wrapped for several ranks.
        optimizers: one, or a list, over parameters of the models; None for evaluation.
        enabled: if False, nothing changes, and `scale_loss` yields the loss itself.
        opt_level: `"O0"` to `"O3"`.
        cast_model_type: dtype of the models and of their floating-point inputs.
        patch_torch_functions: if False at O1, no operator is cast.
        keep_batchnorm_fp32: True, False, or one of these as a string.
        master_weights: whether parameters in low precision have fp32 masters, which the optimizer updates.
        loss_scale: a number, a number as a string, or `"dynamic"`.
        cast_model_outputs: dtype of the models' outputs. None: fp32 if models are cast, else unchanged.
        num_losses: the number of loss scales; see `loss_id` of `scale_loss`.
        verbosity: if 0, skipped steps are not logged.
        dynamic_init_scale: the first value of a dynamic scale.
        scale_growth_factor, scale_window: the scale is multiplied after so many passes without overflow in a row.
        scale_backoff_factor: the scale is multiplied by it after an overflow.
        min_loss_scale, max_loss_scale: bounds of a dynamic scale. None is 2**-24.
        combine_grad: hold parameters and gradients in one piece of memory each. None: if that is faster.
        combine_ddp: exchange gradients in `scale_loss`, instead of in a wrapper around the model; implies combine_grad.
            Ranks get the parameters of rank 0 here, and its buffers after each step.
        ddp_replica_count: ignored. apex divides the exchange into so many pieces; here it is one piece.
        user_cast_preferred: ignored. Registered functions always take precedence over table O1.
        check_combined_tensors: ignored. Gradients outside of their flat memory are always detected.

    Returns:
        The models; or models and optimizers; each as it was given, one or a list.

    Raises:
        AmpError: arguments contradict each other, a model is wrapped or in low precision, or an optimizer was given
            before. It is a RuntimeError, too. Models and optimizers are then unchanged.
        UnsupportedError: the device's backend does not declare what the level needs.
    """
    given = locals()
    if not enabled:
        state.enabled, state.loss_scalers = False, []
        return models if optimizers is None else (models, optimizers)
    if not is_whole(num_losses, 1):
        raise AmpError(
            f"num_losses={num_losses!r} is not a whole number of 1 or more",
            remedy="give a whole number, or remove num_losses",
        )
    properties = _resolve(given)
    all_models, all_optimizers = listed(models, nn.Module, "model"), listed(optimizers, Optimizer, "optimizer")
    _check_models(all_models)
    backend = backend_of(parameter for model in all_models for parameter in model.parameters())
    if properties.policy.autocast:
        backend.autocast(torch.float16, table="O1")  # raises if it is not declared
    dtype, declared = properties.policy.model_dtype, backend.capabilities.model_dtypes
    if dtype is not None and dtype not in declared:
        raise UnsupportedError(f"{backend.name} does not train models in {dtype}", available=", ".join(declared))
    for optimizer in all_optimizers:
        if is_prepared(optimizer):
            raise AmpError(
                f"this {type(optimizer).__name__} was given to amp.initialize before, and is prepared already",
                remedy="give each optimizer once: amp.initialize([model, other], [optimizer, another])",
            )
    if properties.combine_ddp:
        if not dist.is_initialized():
            raise AmpError(
                "combine_ddp=True needs a process group, and there is no process group",
                remedy="call torch.distributed.init_process_group before amp.initialize",
            )
        backend.collectives.init(None)
    scalers = [AmpScaler(backend, properties.policy) for _ in range(num_losses)]
    flat, exchanges = properties.combine_grad, properties.combine_ddp
    prepared = [
        Prepared(backend, all_models, each, properties.policy, flat=flat, exchanges=exchanges, warns=verbosity > 0)
        for each in all_optimizers
    ]
    exact: dict[int, Tensor] = {}
    for model in all_models:
        exact |= _cast(model, properties)
    for each in prepared:
        each.install(exact)
    if properties.policy.autocast:
        enter_o1(backend)
    state.enabled, state.loss_scalers = True, scalers
    if verbosity > 0:
        logger.info("amp: %s on %s", properties, backend.device)
    given_models = all_models if isinstance(models, list | tuple) else models
    if optimizers is None:
        return given_models
    return given_models, all_optimizers if isinstance(optimizers, list | tuple) else optimizers


def _check_models(models: Iterable[nn.Module]) -> None:
    for model in models:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise AmpError(
                f"a model is wrapped in {type(model).__name__}",
                remedy="wrap the model that amp.initialize returns; or use combine_ddp=True, without a wrapper",
            )
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dtype in LOW_PRECISION:
                raise AmpError(
                    f"{name} is {tensor.dtype} already", remedy="give models in fp32; the level decides about casts"
                )


def _cast(model: nn.Module, properties: _Properties) -> dict[int, Tensor]:
    """Cast a model and its boundary; return the earlier values of its trainable parameters, as `hold` does."""
    policy, outputs = properties.policy, properties.cast_model_outputs
    dtype = getattr(torch, policy.model_dtype) if policy.model_dtype else None  # of parameters, and of inputs
    before: dict[int, Tensor] = {}
    if dtype is not None:
        before = hold(model, dtype, keep_batchnorm_fp32=policy.keep_batchnorm_fp32)
    if dtype is not None or outputs is not None:
        cast_boundary(model, inputs=dtype, outputs=outputs)
    if dtype in LOW_PRECISION:
        fp32_state_dict(model)
    return before


def _resolve(given: Mapping[str, Any]) -> _Properties:
    """Return the properties for the arguments of `amp.initialize`; raise AmpError if they contradict each other."""
    opt_level, combine_ddp = given["opt_level"], given["combine_ddp"]
    if opt_level not in _LEVELS:
        raise AmpError(
            f"opt_level={opt_level!r} is not an optimization level",
            available=", ".join(_LEVELS),
            remedy='choose one of these; Ascend recommends "O2" with loss_scale=128.0',
        )
    level = Policy.preset(opt_level)
    for name in ("cast_model_type", "keep_batchnorm_fp32", "master_weights") if level.autocast else ():
        if given[name] is not None and not (name == "cast_model_type" and given[name] in (False, torch.float32)):
            raise AmpError(
                f"{name}={given[name]} at O1 has no effect",
                why="O1 casts the inputs of operators, and leaves the model itself in fp32",
                remedy='remove it, or use opt_level="O2"',
            )
    for name in ("patch_torch_functions", "user_cast_preferred"):
        if given[name] and not level.autocast:
            raise AmpError(
                f"{name}=True at {opt_level} has no effect",
                why="operators and functions are cast at O1 only",
                remedy='remove it, or use opt_level="O1"',
            )
    combines = bool(combine_ddp if given["combine_grad"] is None else given["combine_grad"])
    if combine_ddp and not combines:
        raise AmpError(
            "combine_ddp=True contradicts combine_grad=False",
            why="ranks exchange gradients in one piece of memory",
            remedy="remove combine_grad: it is implied",
        )
    if combines and opt_level in ("O0", "O3"):
        raise AmpError(
            f"combine_grad or combine_ddp at {opt_level} is not possible",
            why="apex has them at O1 and O2 only",
            remedy='remove them, or use opt_level="O1" or "O2"',
        )
    default = None if level.model_dtype is None else getattr(torch, level.model_dtype)
    dtype = _dtype("cast_model_type", given, default)
    keep = _flag("keep_batchnorm_fp32", given, level.keep_batchnorm_fp32)
    casts = level.autocast is not None and given["patch_torch_functions"] is not False
    policy = Policy(
        autocast=level.autocast if casts else None,
        table=level.table if casts else "torch",
        loss_scale=_loss_scale(level.loss_scale if given["loss_scale"] is None else given["loss_scale"], given),
        model_dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        masters=_flag("master_weights", given, level.masters and level.model_dtype == "float16"),
        keep_batchnorm_fp32=keep and dtype is not None,
        cast_boundary=dtype is not None,
    )
    outputs = _dtype("cast_model_outputs", given, None) or (None if dtype is None else torch.float32)
    return _Properties(opt_level, policy, outputs, combines, bool(combine_ddp))


def _loss_scale(loss_scale: Any, given: Mapping[str, Any]) -> float | LossScale | None:
    """Return a static loss scale, the settings of a dynamic one, or None for a scale of 1."""
    if loss_scale is None:
        return None
    if loss_scale == "dynamic":
        largest, smallest = given["max_loss_scale"], given["min_loss_scale"]
        init = min(given["dynamic_init_scale"], largest)
        return LossScale(
            init=init,
            growth=given["scale_growth_factor"],
            backoff=given["scale_backoff_factor"],
            interval=given["scale_window"],
            min=min(_SMALLEST_SCALE, init) if smallest is None else smallest,
            max=largest,
        )
    try:
        scale = float(loss_scale)
    except (TypeError, ValueError):
        scale = 0.0
    if isinstance(loss_scale, bool) or not 0 < scale <= torch.finfo(torch.float32).max:
        raise AmpError(f"loss_scale={loss_scale!r} is not a loss scale", remedy='give a number > 0, or "dynamic"')
    return None if scale == 1.0 else scale


def _flag(name: str, given: Mapping[str, Any], default: bool) -> bool:
    """Return a switch as a bool; scripts pass on words from their command line."""
    value = given[name]
    if value not in (None, True, False, "True", "False"):
        raise AmpError(f"{name}={value!r} is neither True nor False", remedy='give True, False, "True" or "False"')
    return default if value is None else value in (True, "True")


def _dtype(name: str, given: Mapping[str, Any], default: torch.dtype | None) -> torch.dtype | None:
    value = given[name]
    if value is None or value is False:
        return default if value is None else None
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise AmpError(f"{name}={value!r} is not a floating-point dtype of torch", remedy="give one: torch.float16")
    return value

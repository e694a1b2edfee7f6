"""`amp.initialize`: models and optimizers made ready, all checked before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from accelcore.apex import casts
from accelcore.apex.accumulated import Accumulated
from accelcore.apex.backends import backend_of
from accelcore.apex.levels import Properties, resolve
from accelcore.apex.loss_scaling import AmpScaler
from accelcore.apex.prepared import Prepared, is_prepared
from accelcore.apex.routes import settle
from accelcore.apex.state import listed, state
from accelcore.backend import Backend
from accelcore.errors import AmpError, UnsupportedError
from accelcore.precision.casting import CastBoundary, FP32StateDict, hold
from accelcore.precision.table import LOW_PRECISION
from accelcore.wording import is_whole

__all__ = ["initialize"]

logger = logging.getLogger("accelcore")


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
    """Prepare models and optimizers for mixed precision, on the device that the models are on.

    The models are changed in place: cast, with hooks on their `forward`. The optimizers get other `step`, `zero_grad`
    and `add_param_group`, and `clip_optimizer_grad_norm_fused(max_norm, norm_type=2)`, which clips the gradients of all
    they train together, in place and unscaled, and returns their norm. O1 begins here, in this thread, for all that is
    computed on the device, and ends with `reset()`.

    An argument that is None leaves what the level says. O0: models in fp32, a loss scale of 1. O1: operators cast by
    table O1, dynamic scale. O2: models in fp16 but for BatchNorm, fp32 masters, dynamic scale. O3: models in fp16, no
    masters, a loss scale of 1.

    Args:
        models: one, or a list; not yet wrapped for several ranks, and in fp32.
        optimizers: one, or a list, over parameters of the models; None to evaluate.
        enabled: False leaves everything as it is, and `scale_loss` the loss.
        opt_level: `"O0"` to `"O3"`.
        cast_model_type: dtype that models are held in, and their floating-point inputs cast to.
        patch_torch_functions: False at O1: no operator is cast.
        keep_batchnorm_fp32: True, False, or as words.
        master_weights: whether parameters in low precision have fp32 masters, which the optimizer updates.
        loss_scale: a number, or one as a word, or `"dynamic"`.
        cast_model_outputs: dtype of what the models return; None: fp32 where models are cast, else as it comes.
        num_losses: how many scales there are; see `loss_id` of `scale_loss`.
        verbosity: 0 says nothing of skipped steps.
        dynamic_init_scale, scale_growth_factor, scale_backoff_factor, scale_window: where a dynamic scale starts, and
            how it moves: up after `scale_window` clean passes in a row, down after an overflow.
        min_loss_scale, max_loss_scale: between these it stays. None is 2**-24.
        combine_grad: lay parameters and gradients into one piece of memory each. None: where that is faster.
        combine_ddp: exchange gradients in `scale_loss`, instead of in a wrapper around the model; implies combine_grad.
            Ranks get the parameters of rank 0 here, and its buffers after each step.
        ddp_replica_count: into how many pieces apex divides what it exchanges. Here it is exchanged at once.
        user_cast_preferred: registered functions come before table O1 in any case.
        check_combined_tensors: whether gradients are still where they were laid is looked at in any case.

    Returns:
        The models; or models and optimizers; each as it was given, one or a list.

    Raises:
        AmpError: arguments contradict each other, a model is wrapped or in low precision, an optimizer comes for the
            second time. A RuntimeError, too. Models and optimizers are then as they were.
        UnsupportedError: the device's backend does not declare what the level needs.
    """
    if not enabled:
        state.enabled, state.loss_scalers = False, []
        return models if optimizers is None else (models, optimizers)
    for name, number in (("num_losses", num_losses), ("ddp_replica_count", ddp_replica_count)):
        if not is_whole(number, 1):
            raise AmpError(f"{name}={number!r}", remedy="give a whole number, 1 or more")
    properties = resolve(
        opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
        cast_model_outputs=cast_model_outputs,
        moves={
            "init": dynamic_init_scale,
            "growth": scale_growth_factor,
            "backoff": scale_backoff_factor,
            "window": scale_window,
            "min": min_loss_scale,
            "max": max_loss_scale,
        },
        combine_grad=combine_grad,
        combine_ddp=combine_ddp,
        user_cast_preferred=user_cast_preferred,
    )
    all_models, all_optimizers = listed(models, nn.Module, "model"), listed(optimizers, Optimizer, "optimizer")
    _check_models(all_models)
    backend = backend_of(parameter for model in all_models for parameter in model.parameters())
    _check_declared(backend, properties)
    for optimizer in all_optimizers:
        _check_optimizer(optimizer)
        settle(optimizer, backend)
    if properties.combine_ddp:
        _join(backend)
    scalers = [AmpScaler(backend, properties.loss_scale) for _ in range(num_losses)]
    flagged, talks = backend.capabilities.overflow_flag, verbosity > 0
    prepared = [
        Prepared(each, Accumulated(backend, all_models, each, properties), flagged=flagged, talks=talks)
        for each in all_optimizers
    ]
    for model in all_models:
        _cast(model, properties)
    for each in prepared:
        each.put_on()
    if properties.patches:
        casts.enter(backend)
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
                remedy="wrap what amp.initialize has returned; or say combine_ddp=True, and wrap nothing",
            )
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dtype in LOW_PRECISION:
                raise AmpError(
                    f"{name} is {tensor.dtype} already", remedy="give models in fp32, and let the level cast them"
                )


def _check_declared(backend: Backend, properties: Properties) -> None:
    """Raise UnsupportedError for a level that the backend cannot have."""
    if properties.patches:
        backend.autocast(torch.float16, table="O1")
    dtype = properties.cast_model_type
    declared = backend.capabilities.model_dtypes
    if dtype is not None and str(dtype).removeprefix("torch.") not in declared:
        raise UnsupportedError(f"{backend.name} trains no model in {dtype}", available=", ".join(declared))


def _check_optimizer(optimizer: Optimizer) -> None:
    if is_prepared(optimizer):
        raise AmpError(
            f"this {type(optimizer).__name__} was given to amp.initialize before",
            remedy="give each optimizer once: amp.initialize([model, other], [optimizer, another])",
        )


def _join(backend: Backend) -> None:
    """Use the process group that the script has formed."""
    if not dist.is_initialized():
        raise AmpError(
            "combine_ddp=True, and there is no process group",
            remedy="call torch.distributed.init_process_group before amp.initialize",
        )
    backend.collectives.init(None)


def _cast(model: nn.Module, properties: Properties) -> None:
    dtype, outputs = properties.cast_model_type, properties.cast_model_outputs
    if dtype is not None:
        hold(model, dtype, keep_batchnorm_fp32=properties.keep_batchnorm_fp32)
        outputs = outputs or torch.float32
    if dtype is not None or outputs is not None:
        CastBoundary(model, inputs=dtype, outputs=outputs)
    if dtype in LOW_PRECISION:
        FP32StateDict(model)

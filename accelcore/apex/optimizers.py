"""apex.optimizers on any device: Ascend's names, resolved to the fastest correct implementation there.

The device is that of the parameters. An optimizer that was made before its model was moved takes the routes of the new
device in `amp.initialize`.
"""

from __future__ import annotations

from typing import Any

from accelcore.apex.routes import Parameters, create
from accelcore.errors import UnsupportedError
from accelcore.optim.optimizer import Optimizer

__all__ = [
    "FusedAdagrad",
    "FusedAdam",
    "FusedSGD",
    "Lamb",
    "NpuFusedAdadelta",
    "NpuFusedAdam",
    "NpuFusedAdamP",
    "NpuFusedAdamW",
    "NpuFusedBertAdam",
    "NpuFusedLamb",
    "NpuFusedRMSprop",
    "NpuFusedRMSpropTF",
    "NpuFusedSGD",
]

_REFUSED = {
    "FusedLAMB": "its Lamb corrects the bias of the moments and clips by a global norm, which Ascend's does not; "
    "Ascend's, and this, is NpuFusedLamb",
    "FusedMixedPrecisionLamb": "its Lamb corrects the bias of the moments and clips by a global norm; Ascend's, and "
    "this, is NpuFusedLamb",
    "FusedNovoGrad": "no backend has a NovoGrad",
}


def NpuFusedSGD(  # noqa: N802  # Ascend's name, as those below
    params: Parameters,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> Optimizer:
    """`torch.optim.SGD`."""
    return create(
        "sgd", params, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov
    )


def NpuFusedAdam(  # noqa: N802
    params: Parameters,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
) -> Optimizer:
    """`torch.optim.Adam`."""
    return create("adam", params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


def NpuFusedAdamW(  # noqa: N802
    params: Parameters,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
) -> Optimizer:
    """`torch.optim.AdamW`."""
    return create("adamw", params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


def NpuFusedAdamP(  # noqa: N802
    params: Parameters,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    delta: float = 0.1,
    wd_ratio: float = 0.1,
    nesterov: bool = False,
) -> Optimizer:
    """AdamP, as the page on optimizers has it."""
    projection = {"delta": delta, "wd_ratio": wd_ratio, "nesterov": nesterov}
    return create("adamp", params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **projection)


def NpuFusedAdadelta(  # noqa: N802
    params: Parameters, lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0
) -> Optimizer:
    """`torch.optim.Adadelta`."""
    return create("adadelta", params, lr=lr, rho=rho, eps=eps, weight_decay=weight_decay)


def NpuFusedLamb(  # noqa: N802
    params: Parameters,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    adam: bool = False,
    use_global_grad_norm: bool = False,
) -> Optimizer:
    """Ascend's Lamb: no bias correction, norms of parameters cut off at 10. Not NVIDIA's FusedLAMB."""
    norms = {"adam": adam, "use_global_grad_norm": use_global_grad_norm}
    return create("lamb", params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **norms)


Lamb = NpuFusedLamb


def NpuFusedBertAdam(  # noqa: N802
    params: Parameters,
    lr: float,
    warmup: float = -1,
    t_total: int = -1,
    schedule: str = "warmup_linear",
    b1: float = 0.9,
    b2: float = 0.99,
    e: float = 1e-6,
    weight_decay: float = 0.01,
    max_grad_norm: float = -1,
) -> Optimizer:
    """BertAdam with the defaults of Ascend's apex, b2=0.99 and max_grad_norm=-1, which are not torch_npu's.

    A `max_grad_norm` > 0 clips the gradients of each group together.
    """
    return create(
        "bertadam",
        params,
        lr=lr,
        warmup=warmup,
        t_total=t_total,
        schedule=schedule,
        b1=b1,
        b2=b2,
        e=e,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
    )


def NpuFusedRMSprop(  # noqa: N802
    params: Parameters,
    lr: float = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
) -> Optimizer:
    """`torch.optim.RMSprop`."""
    moving = {"alpha": alpha, "momentum": momentum, "centered": centered}
    return create("rmsprop", params, lr=lr, eps=eps, weight_decay=weight_decay, **moving)


def NpuFusedRMSpropTF(  # noqa: N802
    params: Parameters,
    lr: float = 1e-2,
    alpha: float = 0.9,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    decoupled_decay: bool = False,
    lr_in_momentum: bool = True,
) -> Optimizer:
    """TensorFlow's RMSprop, whose mean square starts at 1, as in torch_npu; that of Ascend's apex starts at 0."""
    return create(
        "rmsproptf",
        params,
        lr=lr,
        alpha=alpha,
        eps=eps,
        weight_decay=weight_decay,
        momentum=momentum,
        centered=centered,
        decoupled_decay=decoupled_decay,
        lr_in_momentum=lr_in_momentum,
    )


def FusedAdam(  # noqa: N802
    params: Parameters,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> Optimizer:
    """NVIDIA's: `torch.optim.AdamW`, or with `adam_w_mode=False` `torch.optim.Adam`.

    Raises:
        UnsupportedError: `bias_correction=False`.
    """
    if not bias_correction:
        raise UnsupportedError("FusedAdam without bias_correction", remedy="leave it out, or take NpuFusedBertAdam")
    name = "adamw" if adam_w_mode else "adam"
    return create(name, params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


def FusedSGD(  # noqa: N802
    params: Parameters,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    wd_after_momentum: bool = False,
    materialize_master_grads: bool = True,
    set_grad_none: bool = False,
) -> Optimizer:
    """NVIDIA's: `torch.optim.SGD`.

    Raises:
        UnsupportedError: `wd_after_momentum=True`.
    """
    if wd_after_momentum:
        raise UnsupportedError("FusedSGD with wd_after_momentum", remedy="leave it out")
    return NpuFusedSGD(params, lr, momentum, dampening, weight_decay, nesterov)


def FusedAdagrad(  # noqa: N802
    params: Parameters,
    lr: float = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    set_grad_none: bool = True,
    adagrad_w_mode: bool = False,
) -> Optimizer:
    """NVIDIA's: `torch.optim.Adagrad`.

    Raises:
        UnsupportedError: `adagrad_w_mode=True`.
    """
    if adagrad_w_mode:
        raise UnsupportedError("FusedAdagrad with adagrad_w_mode", remedy="leave it out")
    return create("adagrad", params, lr=lr, eps=eps, weight_decay=weight_decay)


def __getattr__(name: str) -> Any:
    if name in _REFUSED:
        raise UnsupportedError(f"apex.optimizers.{name} is not here", why=_REFUSED[name])
    raise AttributeError(f"accelcore.apex.optimizers has no {name!r}, only {', '.join(__all__)}")

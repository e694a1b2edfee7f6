"""apex.optimizers on any device: Ascend's names for the fastest correct implementation on that device.

The device is the parameters' device. If a model is moved after its optimizer was created, the implementation is chosen
again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from accelcore.apex.state import backend_of
from accelcore.errors import UnsupportedError
from accelcore.optim.engine import Request, Route
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.optim.registry import Optimizers

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

_NVIDIAS_LAMB = (
    "its Lamb corrects the bias of the moments and clips by a global norm; Ascend's Lamb, NpuFusedLamb, does neither"
)
_REFUSED = {
    "FusedLAMB": _NVIDIAS_LAMB,
    "FusedMixedPrecisionLamb": _NVIDIAS_LAMB,
    "FusedNovoGrad": "no backend has a NovoGrad",
}


Parameters = Iterable[Any]  # tensors, or groups of them, as torch's optimizers take them


class _ByDevice(Optimizers):
    """Registry that chooses among the routes of the parameters' device, wherever they are at that moment."""

    def choose(self, request: Request) -> Route:
        of_device = backend_of(request.parameters).optimizers
        of_device._known(request.name)
        return of_device.choose(request)

    def _known(self, asked: str | type[Optimizer]) -> str:
        return str(asked)  # the device's registry knows


_create = _ByDevice().create


# Each function that passes on `locals()` has the argument names of the registry's optimizer.
def NpuFusedSGD(  # noqa: N802  # Ascend's name, as those below
    params: Parameters,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> RoutedOptimizer:
    """`torch.optim.SGD`."""
    return _create("sgd", **locals())


def NpuFusedAdam(  # noqa: N802
    params: Parameters,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
) -> RoutedOptimizer:
    """`torch.optim.Adam`."""
    return _create("adam", **locals())


def NpuFusedAdamW(  # noqa: N802
    params: Parameters,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
) -> RoutedOptimizer:
    """`torch.optim.AdamW`."""
    return _create("adamw", **locals())


def NpuFusedAdamP(  # noqa: N802
    params: Parameters,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    delta: float = 0.1,
    wd_ratio: float = 0.1,
    nesterov: bool = False,
) -> RoutedOptimizer:
    """AdamP, as in docs/optimizers.md."""
    return _create("adamp", **locals())


def NpuFusedAdadelta(  # noqa: N802
    params: Parameters, lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0
) -> RoutedOptimizer:
    """`torch.optim.Adadelta`."""
    return _create("adadelta", **locals())


def NpuFusedLamb(  # noqa: N802
    params: Parameters,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    adam: bool = False,
    use_global_grad_norm: bool = False,
) -> RoutedOptimizer:
    """Ascend's Lamb: no bias correction, norms of parameters at most 10. It differs from NVIDIA's FusedLAMB."""
    return _create("lamb", **locals())


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
) -> RoutedOptimizer:
    """BertAdam with the defaults of Ascend's apex, b2=0.99 and max_grad_norm=-1, which are not torch_npu's.

    A `max_grad_norm` > 0 clips the gradients of each group together.
    """
    return _create("bertadam", **locals())


def NpuFusedRMSprop(  # noqa: N802
    params: Parameters,
    lr: float = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
) -> RoutedOptimizer:
    """`torch.optim.RMSprop`."""
    return _create("rmsprop", **locals())


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
) -> RoutedOptimizer:
    """TensorFlow's RMSprop. Its mean square starts at 1, as in torch_npu; in Ascend's apex it starts at 0."""
    return _create("rmsproptf", **locals())


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
) -> RoutedOptimizer:
    """NVIDIA's FusedAdam: `torch.optim.AdamW`, or with `adam_w_mode=False` `torch.optim.Adam`.

    Raises:
        UnsupportedError: `bias_correction=False`.
    """
    if not bias_correction:
        raise UnsupportedError(
            "FusedAdam cannot run with bias_correction=False", remedy="remove it, or use NpuFusedBertAdam"
        )
    name = "adamw" if adam_w_mode else "adam"
    return _create(name, params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


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
) -> RoutedOptimizer:
    """NVIDIA's FusedSGD: `torch.optim.SGD`.

    Raises:
        UnsupportedError: `wd_after_momentum=True`.
    """
    if wd_after_momentum:
        raise UnsupportedError(
            "FusedSGD cannot run with wd_after_momentum=True", remedy="remove it: torch's SGD decays before momentum"
        )
    return NpuFusedSGD(params, lr, momentum, dampening, weight_decay, nesterov)


def FusedAdagrad(  # noqa: N802
    params: Parameters,
    lr: float = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    set_grad_none: bool = True,
    adagrad_w_mode: bool = False,
) -> RoutedOptimizer:
    """NVIDIA's FusedAdagrad: `torch.optim.Adagrad`.

    Raises:
        UnsupportedError: `adagrad_w_mode=True`.
    """
    if adagrad_w_mode:
        raise UnsupportedError(
            "FusedAdagrad cannot run with adagrad_w_mode=True", remedy="remove it: torch's Adagrad adds the decay"
        )
    return _create("adagrad", params, lr=lr, eps=eps, weight_decay=weight_decay)


def __getattr__(name: str) -> Any:
    if name in _REFUSED:
        raise UnsupportedError(
            f"accelcore.apex has no optimizers.{name}", why=_REFUSED[name], available=", ".join(__all__)
        )
    raise AttributeError(f"accelcore.apex.optimizers has no {name!r}, only {', '.join(__all__)}")

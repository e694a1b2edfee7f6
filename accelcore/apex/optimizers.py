"""apex.optimizers on any device: Ascend's names for the fastest correct implementation on that device.

The device is the parameters' device. If a model is moved after its optimizer was created, the implementation is chosen
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import Parameter, Signature
from typing import Any

from torch.optim import Optimizer

from accelcore.apex.state import backend_of
from accelcore.errors import UnsupportedError
from accelcore.optim.engine import Request, Route
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.optim.registry import Optimizers

__all__ = [
    "FusedAdagrad", "FusedAdam", "FusedSGD", "Lamb", "NpuFusedAdadelta", "NpuFusedAdam", "NpuFusedAdamP",
    "NpuFusedAdamW", "NpuFusedBertAdam", "NpuFusedLamb", "NpuFusedRMSprop", "NpuFusedRMSpropTF", "NpuFusedSGD",
]  # fmt: skip

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


_REQUIRED = Parameter.empty
_BETAS = (0.9, 0.999)


def _function(name: str, optimizer: str, text: str, **options: Any) -> Callable[..., RoutedOptimizer]:
    """Return a function of parameters and options, in this order and with these defaults, that makes an optimizer."""
    kind = Parameter.POSITIONAL_OR_KEYWORD
    named = [Parameter(option, kind, default=value) for option, value in options.items()]
    signature = Signature([Parameter("params", kind), *named])

    def create(*arguments: Any, **given: Any) -> RoutedOptimizer:
        bound = signature.bind(*arguments, **given)
        bound.apply_defaults()
        return _create(optimizer, **bound.arguments)

    create.__name__, create.__qualname__, create.__doc__ = name, name, text
    vars(create)["__signature__"] = signature
    return create


NpuFusedSGD = _function(
    "NpuFusedSGD", "sgd", "`torch.optim.SGD`.",
    lr=_REQUIRED, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False,
)  # fmt: skip
NpuFusedAdam = _function(
    "NpuFusedAdam", "adam", "`torch.optim.Adam`.", lr=1e-3, betas=_BETAS, eps=1e-8, weight_decay=0.0, amsgrad=False
)
NpuFusedAdamW = _function(
    "NpuFusedAdamW", "adamw", "`torch.optim.AdamW`.", lr=1e-3, betas=_BETAS, eps=1e-8, weight_decay=1e-2, amsgrad=False
)
NpuFusedAdamP = _function(
    "NpuFusedAdamP", "adamp", "AdamP, as in docs/optimizers.md.",
    lr=1e-3, betas=_BETAS, eps=1e-8, weight_decay=0.0, delta=0.1, wd_ratio=0.1, nesterov=False,
)  # fmt: skip
NpuFusedAdadelta = _function(
    "NpuFusedAdadelta", "adadelta", "`torch.optim.Adadelta`.", lr=1.0, rho=0.9, eps=1e-6, weight_decay=0.0
)
Lamb = NpuFusedLamb = _function(
    "NpuFusedLamb", "lamb",
    "Ascend's Lamb: no bias correction, norms of parameters at most 10. It differs from NVIDIA's FusedLAMB.",
    lr=1e-3, betas=_BETAS, eps=1e-6, weight_decay=0.0, adam=False, use_global_grad_norm=False,
)  # fmt: skip
NpuFusedBertAdam = _function(
    "NpuFusedBertAdam", "bertadam",
    "BertAdam with the defaults of Ascend's apex, b2=0.99 and max_grad_norm=-1, which are not torch_npu's.\n\n"
    "A `max_grad_norm` > 0 clips the gradients of each group together.",
    lr=_REQUIRED, warmup=-1, t_total=-1, schedule="warmup_linear", b1=0.9, b2=0.99, e=1e-6, weight_decay=0.01,
    max_grad_norm=-1,
)  # fmt: skip
NpuFusedRMSprop = _function(
    "NpuFusedRMSprop", "rmsprop", "`torch.optim.RMSprop`.",
    lr=1e-2, alpha=0.99, eps=1e-8, weight_decay=0.0, momentum=0.0, centered=False,
)  # fmt: skip
NpuFusedRMSpropTF = _function(
    "NpuFusedRMSpropTF", "rmsproptf",
    "TensorFlow's RMSprop. Its mean square starts at 1, as in torch_npu; in Ascend's apex it starts at 0.",
    lr=1e-2, alpha=0.9, eps=1e-10, weight_decay=0.0, momentum=0.0, centered=False, decoupled_decay=False,
    lr_in_momentum=True,
)  # fmt: skip


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

"""apex.optimizers on any device: Ascend's names for the fastest correct implementation on that device.

The device is the parameters' device. If a model is moved after its optimizer was created, the implementation is chosen
again.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from torch.optim import Optimizer

from accelcore.apex.state import backend_of
from accelcore.errors import UnsupportedError
from accelcore.optim.engine import Request
from accelcore.optim.optimizer import Route, RoutedOptimizer
from accelcore.optim.registry import Optimizers

__all__ = [
    "FusedAdagrad", "FusedAdam", "FusedSGD", "Lamb", "NpuFusedAdadelta", "NpuFusedAdam", "NpuFusedAdamP",
    "NpuFusedAdamW", "NpuFusedBertAdam", "NpuFusedLamb", "NpuFusedRMSprop", "NpuFusedRMSpropTF", "NpuFusedSGD",
]  # fmt: skip


class _ByDevice(Optimizers):
    """Registry that chooses among the routes of the parameters' device, wherever they are at that moment."""

    def choose(self, request: Request) -> Route:
        return backend_of(request.parameters).optimizers.choose(request)

    def _known(self, asked: str | type[Optimizer]) -> str:
        return str(asked)  # the device's registry knows


_create = _ByDevice().create


_IGNORED = {"set_grad_none", "materialize_master_grads"}  # they change no update
_ONE_VALUE = {
    "bias_correction": "remove it, or use NpuFusedBertAdam",
    "wd_after_momentum": "remove it: torch's SGD decays before momentum",
    "adagrad_w_mode": "remove it: torch's Adagrad adds the decay",
}
"""Options that must have their default, and what to do if one has not."""
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
        taken = bound.arguments
        for option in _IGNORED & taken.keys():
            del taken[option]
        for option in _ONE_VALUE.keys() & taken.keys():
            if (value := taken.pop(option)) != options[option]:
                raise UnsupportedError(f"{name} cannot run with {option}={value!r}", remedy=_ONE_VALUE[option])
        is_w = taken.pop("adam_w_mode", True)  # of FusedAdam
        return _create(optimizer if is_w else "adam", **taken)

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


FusedAdam = _function(
    "FusedAdam", "adamw",
    "NVIDIA's FusedAdam: `torch.optim.AdamW`, or with `adam_w_mode=False` `torch.optim.Adam`.",
    lr=1e-3, bias_correction=True, betas=_BETAS, eps=1e-8, adam_w_mode=True, weight_decay=0.0, amsgrad=False,
    set_grad_none=True,
)  # fmt: skip
FusedSGD = _function(
    "FusedSGD", "sgd", "NVIDIA's FusedSGD: `torch.optim.SGD`.",
    lr=_REQUIRED, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, wd_after_momentum=False,
    materialize_master_grads=True, set_grad_none=False,
)  # fmt: skip
FusedAdagrad = _function(
    "FusedAdagrad", "adagrad", "NVIDIA's FusedAdagrad: `torch.optim.Adagrad`.",
    lr=1e-2, eps=1e-10, weight_decay=0.0, set_grad_none=True, adagrad_w_mode=False,
)  # fmt: skip

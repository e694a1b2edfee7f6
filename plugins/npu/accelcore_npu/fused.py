"""torch_npu's nine fused optimizers: their arithmetic, on the core's flat memory.

Five of them exist in torch, too; these take torch's arguments, check them as torch does, and have torch's parameter
groups and state, so that a checkpoint goes from one device to another. The other four check their arguments here.
"""

from __future__ import annotations

import warnings
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch_npu import optim

from accelcore_npu.arguments import fractions, not_negative
from accelcore_npu.bertadam import BertAdam
from accelcore_npu.flat import FlatOptimizer, PartedOptimizer

__all__ = ["FUSED"]


class _Twin(FlatOptimizer):
    """A fused optimizer that torch has, too: `torch_class` says what its arguments are, and refuses the bad ones."""

    torch_class: type[torch.optim.Optimizer]

    def __init__(self, params: Any, **options: Any) -> None:
        not_negative(lr=options.get("lr", 0))  # torch's SGD takes one that is not a number
        twin = self.torch_class([torch.zeros(())], **options)
        super().__init__(params, twin.defaults)


class SGD(_Twin, optim.NpuFusedSGD):  # type: ignore[misc]
    """Momentum starts as zeros, so that a parameter whose first gradient comes late starts like the others."""

    torch_class = torch.optim.SGD
    counts = False
    _momentum_buffer_already_in_state = True

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        return {"momentum_buffer": 0.0} if group["momentum"] else {}


class Adam(_Twin, optim.NpuFusedAdam):  # type: ignore[misc]
    """Adam, with L2 regularization."""

    torch_class = torch.optim.Adam

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")
        return dict.fromkeys(names, 0.0)


class AdamW(_Twin, optim.NpuFusedAdamW):  # type: ignore[misc]
    """Adam with decoupled weight decay."""

    torch_class = torch.optim.AdamW
    initial_state = Adam.initial_state


class Adadelta(_Twin, optim.NpuFusedAdadelta):  # type: ignore[misc]
    """Adadelta."""

    torch_class = torch.optim.Adadelta

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        return {"square_avg": 0.0, "acc_delta": 0.0}


class RMSprop(_Twin, optim.NpuFusedRMSprop):  # type: ignore[misc]
    """RMSprop, eps outside the root."""

    torch_class = torch.optim.RMSprop
    start = 0.0

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        state = {"square_avg": self.start}
        if group["momentum"] > 0:
            state["momentum_buffer"] = 0.0
        if group["centered"]:
            state["grad_avg"] = 0.0
        return state


class _OldSignatures(FlatOptimizer):
    """For torch_npu's classes that call `add_(number, tensor)`, of which torch says once that it is deprecated."""

    def _group_step(self, group_index: int) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This overload of add", UserWarning)
            super()._group_step(group_index)


class RMSpropTF(_OldSignatures, optim.NpuFusedRMSpropTF):  # type: ignore[misc]
    """RMSprop as TensorFlow has it: eps inside the root, the mean square starts at 1."""

    start = 1.0
    initial_state = RMSprop.initial_state

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        alpha: float = 0.9,
        eps: float = 1e-10,
        weight_decay: float = 0,
        momentum: float = 0.0,
        centered: bool = False,
        decoupled_decay: bool = False,
        lr_in_momentum: bool = True,
    ) -> None:
        not_negative(lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)
        super().__init__(
            params,
            {
                "lr": lr,
                "alpha": alpha,
                "eps": eps,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "centered": centered,
                "decoupled_decay": decoupled_decay,
                "lr_in_momentum": lr_in_momentum,
            },
        )


class AdamP(_OldSignatures, PartedOptimizer, optim.NpuFusedAdamP):  # type: ignore[misc]
    """AdamP: the part of the update that would only grow a weight's norm is projected out."""

    temporaries = (
        ("perturb_lists_indexed_by_group", "combined_perturb_lists_indexed_by_group"),
        ("wd_ratio_lists_indexed_by_group", "combined_wd_ratio_lists_indexed_by_group"),
    )

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        nesterov: bool = False,
    ) -> None:
        not_negative(lr=lr, eps=eps, weight_decay=weight_decay, delta=delta, wd_ratio=wd_ratio)
        fractions(**{"betas[0]": betas[0], "betas[1]": betas[1]})
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "delta": delta,
                "wd_ratio": wd_ratio,
                "nesterov": nesterov,
            },
        )

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def _projection(
        self, p: Tensor, grad: Tensor, perturb: Tensor, delta: float, wd_ratio: float, eps: float
    ) -> tuple[Tensor, float]:
        # torch_npu views all three as matrices, which tensors with strides of their own do not allow; and has no
        # largest cosine of no rows.
        if not p.numel():
            return perturb, 1.0
        dense = (tensor.contiguous() for tensor in (p, grad, perturb))
        projected: tuple[Tensor, float] = super()._projection(*dense, delta, wd_ratio, eps)
        return projected


class Lamb(PartedOptimizer, optim.NpuFusedLamb):  # type: ignore[misc]
    """LAMB without bias correction: the step of each tensor is scaled by the ratio of its norm to the update's."""

    initial_state = AdamP.initial_state
    temporaries = (
        ("trust_ratio_lists_indexed_by_group", "combined_trust_ratios_indexed_by_group"),
        ("param_pow_lists_indexed_by_group", "combined_param_pows_indexed_by_group"),
        ("adam_step_pow_lists_indexed_by_group", "combined_adam_step_pows_indexed_by_group"),
    )

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
        use_global_grad_norm: bool = False,
    ) -> None:
        not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        fractions(**{"betas[0]": betas[0], "betas[1]": betas[1]})
        self.adam = adam
        self.use_global_grad_norm = use_global_grad_norm
        self.global_grad_norm = torch.ones(())  # on the host, because torch_npu reads it there for every group
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _combine(self) -> None:
        super()._combine()
        gradients = list(chain.from_iterable(self.combined_grads_indexed_by_group))
        if self.use_global_grad_norm and gradients:
            self.global_grad_norm = torch.stack(torch._foreach_norm(gradients)).norm().cpu()


FUSED: dict[str, type[FlatOptimizer]] = {
    "adadelta": Adadelta,
    "adam": Adam,
    "adamp": AdamP,
    "adamw": AdamW,
    "bertadam": BertAdam,
    "lamb": Lamb,
    "rmsprop": RMSprop,
    "rmsproptf": RMSpropTF,
    "sgd": SGD,
}
"""Our class for each optimizer that torch_npu fuses, by the registry's name."""

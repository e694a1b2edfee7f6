"""SGD with momentum, Adam and AdamW, one tensor at a time; their fast routes are fused kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from accelcore.optim.formulas.formula import Formula


class SGD(Formula, torch.optim.SGD):
    """p = p - lr · b, with b = momentum · b + (1 - dampening) · g; Nesterov's: p = p - lr · (g + momentum · b).

    Weight decay is added to the gradient first. The first gradient of a parameter is not dampened. Source: Sutskever et
    al., "On the importance of initialization and momentum in deep learning" (2013), in the form of torch.optim.SGD,
    whose options it has.
    """

    counts = False

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        if not group["momentum"]:
            return {}
        # Zeros give the right first buffer, unless the gradient is dampened: nan then marks a new buffer.
        return {"momentum_buffer": math.nan if group["dampening"] else 0.0}

    def compute(self, group: dict[str, Any], value: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        momentum = group["momentum"]
        if group["weight_decay"]:
            gradient = gradient.add(value, alpha=group["weight_decay"])
        if momentum:
            buffer = state["momentum_buffer"]
            first = buffer.isnan() if group["dampening"] else None
            buffer.mul_(momentum).add_(gradient, alpha=1 - group["dampening"])
            if first is not None:
                buffer.copy_(gradient.where(first, buffer))
            gradient = gradient.add(buffer, alpha=momentum) if group["nesterov"] else buffer
        value.sub_(gradient * group["lr"])


class Adam(Formula, torch.optim.Adam):
    """p = p - lr · m̂ / (√v̂ + eps), with weight decay added to the gradient first.

    m̂ and v̂ are corrected for their start at zero. Source: Kingma and Ba, "Adam" (2015); as torch.optim.Adam, whose
    options it has.
    """

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        return dict.fromkeys(("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])), 0.0)

    def compute(self, group: dict[str, Any], value: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        mean, square, updates = state["exp_avg"], state["exp_avg_sq"], state["step"].item()
        if group["decoupled_weight_decay"]:
            value.mul_(1 - group["lr"] * group["weight_decay"])
        elif group["weight_decay"]:
            gradient = gradient.add(value, alpha=group["weight_decay"])
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if group["amsgrad"]:
            square = torch.maximum(state["max_exp_avg_sq"], square, out=state["max_exp_avg_sq"])
        root = (square / (1 - beta2**updates)).sqrt_().add_(group["eps"])
        value.sub_(mean / (1 - beta1**updates) / root * group["lr"])


class AdamW(Adam, torch.optim.AdamW):
    """p = p·(1 - lr·weight_decay) - lr · m̂ / (√v̂ + eps): Adam, with weight decay apart from the gradient.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019); as torch.optim.AdamW, whose options
    it has.
    """

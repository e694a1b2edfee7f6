"""SGD, with momentum."""

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

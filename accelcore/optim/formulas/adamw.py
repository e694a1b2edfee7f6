"""AdamW: Adam, with weight decay that does not pass through the moments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelcore.optim.formulas.adam import adam_direction, adam_state
from accelcore.optim.formulas.formula import Formula

__all__ = ["AdamW"]


class AdamW(Formula, torch.optim.AdamW):
    """p = p·(1 - lr·weight_decay) - lr · m̂ / (√v̂ + eps), with m̂ and v̂ corrected for their start at zero.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019); as torch.optim.AdamW, whose options
    it has.
    """

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        return adam_state(group)

    def compute(self, group: dict[str, Any], value: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        value.mul_(1 - group["lr"] * group["weight_decay"])
        value.sub_(adam_direction(group, gradient, state) * group["lr"])

"""Cast: the model is held in the dtype of its policy, and autocast is made ready."""

from __future__ import annotations

import logging

import torch
from torch import nn

from accelcore.errors import UnsupportedError
from accelcore.training.contexts import Contexts
from accelcore.training.plan import Plan
from accelcore.training.policy import LOW, choose_policy

__all__ = ["Cast"]

logger = logging.getLogger("accelcore")


class Cast:
    """Casts floating-point parameters and buffers to the policy's `model_dtype`."""

    def __init__(self) -> None:
        self._warned = False

    def check(self, plan: Plan) -> None:
        options = plan.options
        plan.policy = choose_policy(options["precision"], options["loss_scale"])
        plan.contexts = Contexts(plan.backend, plan.policy, options["fp32"])
        declared = plan.backend.capabilities.model_dtypes
        for name, parameter in plan.model.named_parameters():
            dtype = plan.policy.model_dtype or str(parameter.dtype).removeprefix("torch.")
            if parameter.is_floating_point() and dtype not in declared:
                raise UnsupportedError(
                    f"the parameter {name} is {dtype}, which {plan.backend.name} does not train",
                    available=", ".join(declared),
                    remedy='keep the parameters in fp32 and say precision="bf16" or "fp16"',
                )

    def apply(self, plan: Plan) -> None:
        if plan.policy.model_dtype is not None:
            plan.model.to(getattr(torch, plan.policy.model_dtype))
        low = [name for name, parameter in plan.model.named_parameters() if _is_low(parameter)]
        if low and not plan.policy.masters and not self._warned:
            self._warned = True
            logger.warning(
                "%d parameters, such as %s, are held in low precision without fp32 masters: small updates are lost",
                len(low),
                low[0],
            )


def _is_low(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.dtype in LOW

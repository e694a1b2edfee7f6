"""The gradients that a loss scaler looks at: of an optimizer's parameters, dense or sparse, real or complex."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelcore.errors import TrainingError

__all__ = ["FindBad", "by_dtype", "first_not_finite", "gradients_of", "is_finite", "refuse_fp16"]

# Looked at in every step, of every gradient: without a frame of Python's for each.
_DTYPE, _IS_SPARSE = attrgetter("dtype"), attrgetter("is_sparse")


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """The gradients of an optimizer's parameters, as dense tensors."""
    groups = optimizer.param_groups
    found = [gradient for group in groups for p in group["params"] if (gradient := p.grad) is not None]
    if True in map(_IS_SPARSE, found):
        return [gradient._values() if gradient.is_sparse else gradient for gradient in found]
    return found


def by_dtype(gradients: Sequence[Tensor]) -> Mapping[torch.dtype, Sequence[Tensor]]:
    """Gradients by their dtype, which kernels for many take one at a time; complex ones as pairs of real numbers."""
    dtypes = set(map(_DTYPE, gradients))
    if any(dtype.is_complex for dtype in dtypes):
        return by_dtype([torch.view_as_real(each) if each.is_complex() else each for each in gradients])
    if len(dtypes) == 1:
        return {dtypes.pop(): gradients}
    return {dtype: [each for each in gradients if each.dtype == dtype] for dtype in dtypes}


def refuse_fp16(dtypes: Iterable[torch.dtype]) -> None:
    """Raise TrainingError where gradients are fp16."""
    if torch.float16 in dtypes:
        raise TrainingError(
            "the gradients are fp16, and dividing them by the loss scale in fp16 would lose the small ones",
            remedy="keep the parameters in fp32 and let autocast choose the dtype of each operator, or train fp32 "
            'masters: precision="O2"',
        )


def first_not_finite(optimizers: Iterable[Optimizer]) -> str | None:
    """The name, or place, of the first parameter whose gradient has an inf or NaN in it. Waits for the device."""
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if parameter.grad is not None and not is_finite(parameter.grad):
                    return _name(group, number, position, parameter)
    return None


def is_finite(gradient: Tensor) -> bool:
    """Whether all of it is. Waits for the device."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.isfinite().all())


def _name(group: Mapping[str, Any], number: int, position: int, parameter: Tensor) -> str:
    names = group.get("param_names")  # where the optimizer was made of named parameters
    if names is not None:
        return str(names[position])
    return f"parameter {position} of group {number}, of shape {tuple(parameter.shape)}"


FindBad = Callable[[], "str | None"]
"""Names the first parameter whose gradient is not finite; None: they all are."""

"""What all formulas share: options, state, and the way of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from accelcore.errors import TrainingError
from accelcore.optim.formulas.checks import not_negative
from accelcore.optim.stepping import loss_by

__all__ = ["STATE_DTYPES", "Formula"]

STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What `state_dtype` can be. None: the parameter's dtype, and float32 for parameters of low precision."""


class Formula(torch.optim.Optimizer):
    """An optimizer as its formula says: the reference of every route, and the fallback on every device.

    A subclass has the options, says what state there is, and computes the update of one tensor. A route with a kernel
    of its own can subclass that again, and replace `step` by its kernel.

    State has torch's keys: `step`, a float32 scalar, where updates are counted; the rest in the shape and
    strides of the tensor. Arithmetic and state are float32 where a parameter has lower precision. Complex parameters
    are treated as pairs of real numbers, as in torch.

    Args:
        params: parameters or groups.
        state_dtype: `"float32"` or `"bfloat16"`, in which the state is kept whatever the parameter is; None decides.
        arguments, options: for the constructor that comes next.

    Attributes:
        by_element: whether it treats each element alike, so that a 1-D tensor may stand for many parameters.
        by_group: whether it looks at the parameters of a group together, so that groups with equal options must be
            told apart.
        counts: whether the state counts the updates.
        counts_on_device: whether it does where the tensor is, and not on the host.
    """

    by_element = True
    by_group = False
    counts = True
    counts_on_device = False

    def __init__(self, params: Any, *arguments: Any, state_dtype: str | None = None, **options: Any) -> None:
        super().__init__(params, *arguments, **options)
        if state_dtype is not None:
            self.defaults["state_dtype"] = state_dtype
            for group in self.param_groups:
                group.setdefault("state_dtype", state_dtype)
        for group in self.param_groups:
            not_negative(lr=group["lr"])  # torch looks at the default only, and takes nan in SGD
            _check_state_dtype(group)

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        """Names of the state that a tensor of this group has beside `step`, and the value each starts with."""
        raise NotImplementedError

    def compute(self, group: dict[str, Any], value: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        """Update a tensor and its state in place; `state["step"]` counts this update. All are of one dtype."""
        raise NotImplementedError

    def factors(self, gradients: Sequence[Sequence[Tensor]]) -> Sequence[Tensor | None]:
        """For each group, given the gradients in each: what they are multiplied by first; None for nothing."""
        return [None] * len(gradients)

    def state_dtype(self, group: dict[str, Any], value: Tensor) -> torch.dtype:
        """In what the state of a tensor is kept."""
        name = group.get("state_dtype")
        return _exact(value.dtype) if name is None else STATE_DTYPES[name]

    def entry(self, group: dict[str, Any], value: Tensor) -> dict[str, Any]:
        """The state of a tensor, made where there is none yet."""
        starts = self.initial_state(group)
        if not starts and not self.counts:
            return {}
        entry: dict[str, Any] = self.state[value]
        if self.counts and "step" not in entry:
            place = value.device if self.counts_on_device else torch.device("cpu")
            entry["step"] = torch.zeros((), dtype=torch.float32, device=place)
        for name, start in starts.items():
            if entry.get(name) is None:
                number = complex(start, start) if value.is_complex() else start
                entry[name] = torch.full_like(value, number, dtype=self.state_dtype(group, value))
        return entry

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every tensor that has a gradient."""
        loss = loss_by(closure)
        present = [[value for value in group["params"] if value.grad is not None] for group in self.param_groups]
        gradients = [[_dense(value.grad) for value in values] for values in present]
        factors = self.factors(gradients)
        for group, values, group_gradients, factor in zip(self.param_groups, present, gradients, factors, strict=True):
            for value, gradient in zip(values, group_gradients, strict=True):
                self._update(group, value, gradient, factor)
        return loss

    def _update(self, group: dict[str, Any], value: Tensor, gradient: Tensor, factor: Tensor | None) -> None:
        entry = self.entry(group, value)
        if self.counts:
            entry["step"] += 1
        exact = _exact(value.dtype)
        result, gradient = value.to(exact), gradient.to(exact)
        if factor is not None:
            gradient = gradient * factor.to(gradient.device)
        if group.get("maximize"):
            gradient = -gradient
        kept = {name: tensor for name, tensor in entry.items() if name != "step" and tensor is not None}
        exactly = {name: tensor.to(exact) for name, tensor in kept.items()}
        state = {name: _real(tensor) for name, tensor in exactly.items()}
        self.compute(group, _real(result), _real(gradient), state | {"step": entry.get("step")})
        # What was exact enough was not copied, and is there already.
        if result is not value:
            value.copy_(result)
        for name, tensor in kept.items():
            if exactly[name] is not tensor:
                tensor.copy_(exactly[name])


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _dense(gradient: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        raise TrainingError(
            "a gradient is sparse, and the formula computes with dense ones",
            remedy="make the embedding with sparse=False, or take an optimizer that updates sparsely",
        )
    return gradient


def _real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _check_state_dtype(group: dict[str, Any]) -> None:
    name = group.get("state_dtype")
    if name is None:
        return
    if name not in STATE_DTYPES:
        raise ValueError(f"there is no state_dtype {name!r}, only {', '.join(STATE_DTYPES)}")
    if any(value.is_complex() for value in group["params"]):
        raise ValueError(f"the state of a complex parameter is complex, and cannot be {name}")

"""What all formulas share: options, state, and the way of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accelcore.errors import TrainingError

__all__ = ["STATE_DTYPES", "Formula"]

STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What `state_dtype` can be. None: the parameter's dtype, and float32 for parameters of low precision."""


class Formula(torch.optim.Optimizer):
    """An optimizer as its formula says: the reference of every route, and the fallback on every device.

    A subclass has the options, says what state there is, and computes the update of one tensor. A route with a kernel
    of its own can subclass that again, and replace `step` by its kernel.

    State has torch's keys: `step`, a float32 scalar on the host, where updates are counted; the rest in the shape and
    strides of the tensor. Arithmetic and state are float32 where a parameter has lower precision.

    Args:
        params: parameters or groups.
        state_dtype: `"float32"` or `"bfloat16"`, in which the state is kept whatever the parameter is; None decides.
        arguments, options: for the constructor that comes next.

    Attributes:
        by_element: whether it treats each element alike, so that a 1-D tensor may stand for many parameters.
        counts: whether the state counts the updates.
    """

    by_element = True
    counts = True

    def __init__(self, params: Any, *arguments: Any, state_dtype: str | None = None, **options: Any) -> None:
        super().__init__(params, *arguments, **options)
        if state_dtype is not None:
            self.defaults["state_dtype"] = state_dtype
            for group in self.param_groups:
                group.setdefault("state_dtype", state_dtype)
        for group in self.param_groups:
            if group.get("state_dtype") not in (None, *STATE_DTYPES):
                raise ValueError(f"there is no state_dtype {group['state_dtype']!r}, only {', '.join(STATE_DTYPES)}")

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        """Names of the state that a tensor of this group has beside `step`, and the value each starts with."""
        raise NotImplementedError

    def compute(self, group: dict[str, Any], value: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        """Update a tensor and its state in place; `state["step"]` counts this update. All are of one dtype."""
        raise NotImplementedError

    def state_dtype(self, group: dict[str, Any], value: Tensor) -> torch.dtype:
        """In what the state of a tensor is kept."""
        name = group.get("state_dtype")
        return _exact(value.dtype) if name is None else STATE_DTYPES[name]

    def entry(self, group: dict[str, Any], value: Tensor) -> dict[str, Any]:
        """The state of a tensor, made where there is none yet."""
        entry: dict[str, Any] = self.state[value]
        if self.counts and "step" not in entry:
            entry["step"] = torch.zeros((), dtype=torch.float32)
        for name, start in self.initial_state(group).items():
            if entry.get(name) is None:
                entry[name] = torch.full_like(value, start, dtype=self.state_dtype(group, value))
        return entry

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every tensor that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    self._update(group, value, value.grad)
        return loss

    def _update(self, group: dict[str, Any], value: Tensor, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise TrainingError(
                "a gradient is sparse, and the formula computes with dense ones",
                remedy="make the embedding with sparse=False, or take an optimizer that updates sparsely",
            )
        entry = self.entry(group, value)
        if self.counts:
            entry["step"] += 1
        if group.get("maximize"):
            gradient = -gradient
        exact = _exact(value.dtype)
        state = {name: kept.to(exact) if name != "step" else kept for name, kept in entry.items()}
        result = value.to(exact)
        self.compute(group, result, gradient.to(exact), state)
        # What was exact enough was not copied, and is there already.
        if result is not value:
            value.copy_(result)
        for name, kept in entry.items():
            if state[name] is not kept:
                kept.copy_(state[name])


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)

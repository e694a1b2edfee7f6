"""torch_npu's fused arithmetic on the core's flat memory.

torch_npu's classes compute an update (`_group_step`) on "combined tensors": parameters, gradients and state of many
tensors, each in one piece of memory. They build these once, at the first step. They miss gradients that arrive later,
new gradient tensors and loaded state. The core's runs have the same form and stay up to date, so they replace the
combined tensors. Options, checks and state are the formula's.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from accelcore.optim.formulas import Formula


class FusedFormula(Formula):
    """Base of optimizers with a formula's options and torch_npu's arithmetic; put it before the formula's class."""

    vendor: type  # torch_npu's class

    def update(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        self._combine()
        with warnings.catch_warnings():
            # Some of these classes call the deprecated `add_(number, tensor)`.
            warnings.filterwarnings("ignore", "This overload of add", UserWarning)
            for index in range(len(self.param_groups)):
                self.vendor._group_step(self, index)  # type: ignore[attr-defined]  # torch_npu is untyped

    def _combine(self) -> None:
        """Set the lists that torch_npu's `_group_step` reads. They have an entry for each run instead of each dtype."""
        groups = [[value for value in group["params"] if value.grad is not None] for group in self.param_groups]
        self.combined_params_indexed_by_group = groups
        self.combined_grads_indexed_by_group = [[value.grad for value in values] for values in groups]
        self.combined_param_states_indexed_by_group = [
            [self._counted(group, value) for value in values]
            for group, values in zip(self.param_groups, groups, strict=True)
        ]

    def _counted(self, group: dict[str, Any], value: Tensor) -> dict[str, Any]:
        entry = self.entry(group, value)
        # torch_npu computes with the step number on the host.
        return {**entry, "step": int(entry["step"])} if self.counts else entry

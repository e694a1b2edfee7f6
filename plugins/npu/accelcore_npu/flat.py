"""torch_npu's fused arithmetic on the core's flat memory.

torch_npu's classes compute an update (`_group_step`) on "combined tensors": parameters, gradients and state of many
tensors, each in one piece. They lay these out once, at the first step, and never look again: a gradient that arrives
later, one that backward made anew, a state that was loaded, all go unseen. The core's runs are such pieces, and are
kept right; so they take the place of the combined tensors. Options, checks and state are the formula's.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from accelcore.optim.formulas import Formula

__all__ = ["FusedFormula"]


class FusedFormula(Formula):
    """Base of optimizers with a formula's options and torch_npu's arithmetic; put it before the formula's class.

    Attributes:
        vendor: torch_npu's class.
    """

    vendor: type

    def update(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        self._combine()
        with warnings.catch_warnings():
            # torch says once that the `add_(number, tensor)` of some of these classes is deprecated.
            warnings.filterwarnings("ignore", "This overload of add", UserWarning)
            for index in range(len(self.param_groups)):
                self.vendor._group_step(self, index)  # type: ignore[attr-defined]  # torch_npu is untyped

    def _combine(self) -> None:
        """Set what torch_npu's `_group_step` reads: for each group a list; there one entry a dtype, here one a run."""
        groups = [[value for value in group["params"] if value.grad is not None] for group in self.param_groups]
        self.combined_params_indexed_by_group = groups
        self.combined_grads_indexed_by_group = [[value.grad for value in values] for values in groups]
        self.combined_param_states_indexed_by_group = [
            [self._counted(group, value) for value in values]
            for group, values in zip(self.param_groups, groups, strict=True)
        ]

    def _counted(self, group: dict[str, Any], value: Tensor) -> dict[str, Any]:
        entry = self.entry(group, value)
        # torch_npu computes with the number on the host, which is where it is counted.
        return {**entry, "step": int(entry["step"])} if self.counts else entry

"""torch_npu's fused arithmetic on the core's flat memory.

torch_npu's classes compute an update (`_group_step`) on "combined tensors": parameters, gradients and state of many
tensors, each in one piece. They lay these out once, at the first step, and never look again: a gradient that arrives
later, one that backward made anew, a state that was loaded, all go unseen. The core's runs are such pieces, and are
kept right; so they take the place of the combined tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_npu.optim.npu_fused_optim_base import NpuFusedOptimizerBase

from accelcore.optim.memory import Run

__all__ = ["FlatOptimizer", "PartedOptimizer"]


class FlatOptimizer(NpuFusedOptimizerBase):  # type: ignore[misc]  # torch_npu is untyped
    """Base of our fused optimizers, over runs; put it before one of torch_npu's, whose `_group_step` it calls.

    `state` has torch's layout: `step` a float32 tensor on the host, the rest laid out as the run.

    Attributes:
        counts: whether `state` counts the updates.
    """

    counts = True

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        # Past torch_npu's constructors, which check less than torch's do and make device tensors before any is needed.
        NpuFusedOptimizerBase.__init__(self, params, defaults)

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        """Names of the state in this group, and the value each starts with."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self) -> None:
        """Update every run that has a gradient."""
        self._combine()
        for index in range(len(self.param_groups)):
            self._group_step(index)

    def _combine(self) -> None:
        """Set what torch_npu's `_group_step` reads: for each group a list; there one entry a dtype, here one a run."""
        groups = [[value for value in group["params"] if value.grad is not None] for group in self.param_groups]
        self.combined_params_indexed_by_group = groups
        self.combined_grads_indexed_by_group = [[value.grad for value in values] for values in groups]
        self.combined_param_states_indexed_by_group = [
            [self._entry(value, group) for value in values]
            for group, values in zip(self.param_groups, groups, strict=True)
        ]

    def _entry(self, value: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        entry: dict[str, Any] = self.state[value]
        for name, start in self.initial_state(group).items():
            if entry.get(name) is None:
                entry[name] = torch.full_like(value, start)
        if not self.counts:
            return entry
        # A state that was loaded may count on the device, where the host would wait for it in every step.
        entry["step"] = torch.as_tensor(entry.get("step", 0), dtype=torch.float32, device="cpu")
        return {**entry, "step": int(entry["step"])}  # torch_npu computes with it on the host


class PartedOptimizer(FlatOptimizer):
    """Base of those that tell the parameters of a run apart.

    Attributes:
        temporaries: what torch_npu calls its temporaries: the lists of views, one a parameter, and the whole tensors.
    """

    temporaries: tuple[tuple[str, str], ...] = ()

    def place_runs(self, runs: Sequence[Run]) -> None:
        """Learn which parameters are in each run."""
        self._parameters = {run.value: _parameters(run) for run in runs}
        self._scratch: dict[tuple[Tensor, str], Any] = {}
        for run in runs:
            for views, whole in self.temporaries:
                scratch = torch.zeros_like(run.value)
                self._scratch[run.value, whole] = scratch
                self._scratch[run.value, views] = run.parts(scratch)

    def _combine(self) -> None:
        super()._combine()
        groups = self.combined_params_indexed_by_group
        self.params_lists_indexed_by_group = [[self._parameters[value] for value in values] for values in groups]
        for names in self.temporaries:
            for name in names:
                setattr(self, name, [[self._scratch[value, name] for value in values] for values in groups])


def _parameters(run: Run) -> list[Tensor]:
    """The parameters of a run, each with its gradient."""
    assert run.gradient is not None
    parameters = run.parts(run.value)
    for parameter, gradient in zip(parameters, run.parts(run.gradient), strict=True):
        parameter.grad = gradient
    return parameters

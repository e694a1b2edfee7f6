"""How an optimizer runs by a kernel: all its tensors in one call, wherever they lie."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.profiler import record_function

from accelcore.errors import TrainingError
from accelcore.optim.formulas import Formula
from accelcore.optim.runs import Run
from accelcore_cpu.table import Found, Member, Table

__all__ = ["Native"]

_NOTHING = nullcontext()


class Native(Formula):
    """A formula by a kernel. Subclasses put this before the formula whose options, checks and state they have.

    Gradients are read where backward left them. Where a step is given a `grad_scale` they are divided by it in memory,
    as by torch's fused kernels.

    Attributes:
        kernel: its name.
        number: its number.
        states: the names of the state that belongs to elements, in the kernel's order.
        by_row: whether it looks at each row of a matrix.
    """

    kernel: ClassVar[str]
    number: ClassVar[int]
    states: ClassVar[tuple[str, ...]]
    by_row: ClassVar[bool] = False
    _step_supports_amp_scaling = True
    _table: Table | None = None
    _wanted: Sequence[tuple[str, ...]] = ()
    _runs: Sequence[Run] = ()
    _found: Found | None = None

    def numbers(self, group: dict[str, Any]) -> tuple[float, ...]:
        """The options of a group, in the kernel's order."""
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._table = None

    def place_runs(self, runs: Sequence[Run]) -> None:
        """Runs are given in place of parameters from now on."""
        self._runs, self._table = runs, None

    def update(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        found = self._look() if self._found is None else self._found
        self._found = None
        table, copies = self._table, list[tuple[Tensor, Tensor]]()
        if table is None or found is Found.REPLACED:
            table = self._table = self._lay_out()
            found = table.find()
        if found is not Found.ALL:
            table, copies = self._place(table)
        numbers = [self.numbers(group) for group in self.param_groups]
        with record_function(f"accelcore::{self.kernel}") if torch._C._autograd._profiler_enabled() else _NOTHING:
            table.step(numbers, found_inf, grad_scale)
        if grad_scale is not None:
            for gradient, copy in copies:
                gradient.copy_(copy)

    def replaced(self) -> bool:
        """Whether a value is not where it was in the last step. `update` relies on it, if it was called just before."""
        self._found = self._look()
        return self._found is Found.REPLACED

    def _look(self) -> Found:
        """Find the gradients, unless the table is of other tensors or other state than there are now."""
        table = self._table
        if table is None or not table.of([group["params"] for group in self.param_groups], self.state):
            return Found.REPLACED
        wanted = [tuple(self.initial_state(group)) for group in self.param_groups]
        return table.find() if wanted == self._wanted else Found.REPLACED

    def _place(self, table: Table) -> tuple[Table, list[tuple[Tensor, Tensor]]]:
        """Find gradients one by one, and copy those that are laid out otherwise than their values."""
        gradients: list[Any] = [member.value.grad for member in table.members]
        if any(g is not None and g.dtype is not m.gradient for g, m in zip(gradients, table.members, strict=True)):
            table = self._table = self._lay_out()
        copies: list[tuple[Tensor, Tensor]] = []
        table.place([_address(*pair, copies) for pair in zip(gradients, table.members, strict=True)])
        return table, copies

    def _lay_out(self) -> Table:
        self._wanted = [tuple(self.initial_state(group)) for group in self.param_groups]
        runs = {id(run.value): run for run in self._runs}
        members: list[Member] = []
        for number, group in enumerate(self.param_groups):
            for value in group["params"]:
                gradient = value.grad
                waits = gradient is None and not self.state.get(value)
                entry = {} if waits else self._fitted(group, value)
                dtype = value.dtype if gradient is None else gradient.dtype
                states = [entry.get(name) for name in self.states]
                parts = _parts(value, None if self.by_element else runs.get(id(value)))
                members.append(Member(number, value, dtype, entry, states, parts, waits))
        groups = [group["params"] for group in self.param_groups]
        return Table(self.number, members, groups, list(self.state.values()), by_row=self.by_row)

    def _fitted(self, group: dict[str, Any], value: Tensor) -> dict[str, Any]:
        """The state of a tensor, as the kernel takes it: laid out alike, and of one dtype."""
        entry = self.entry(group, value)
        dtype = self.state_dtype(group, value)
        for name in self.states:
            state = entry.get(name)
            if state is not None and (state.dtype, state.stride(), state.device) != (
                dtype,
                value.stride(),
                value.device,
            ):
                entry[name] = torch.empty_like(value, dtype=dtype).copy_(state)
        step: Any = entry.get("step")
        if self.counts and not (isinstance(step, Tensor) and step.dtype is torch.float32 and step.device.type == "cpu"):
            entry["step"] = torch.tensor(float(step), dtype=torch.float32)
        return entry


def _address(gradient: Any, member: Member, copies: list[tuple[Tensor, Tensor]]) -> int:
    """Where the kernel finds a gradient: in a copy, if it is laid out otherwise than its tensor."""
    if gradient is None:
        return 0
    if gradient.layout is not torch.strided:
        raise TrainingError(
            "a gradient is sparse, and the kernel would take its memory for a dense one",
            remedy='make the embedding with sparse=False, or the optimizer by route="loop" where it has one',
        )
    if gradient.stride() != member.value.stride() or gradient.device != member.value.device:
        copies.append((gradient, torch.empty_like(member.value, dtype=gradient.dtype).copy_(gradient)))
        gradient = copies[-1][1]
    return int(gradient.data_ptr()) or 1  # of nothing: any address


def _parts(value: Tensor, run: Run | None) -> Sequence[tuple[int, torch.Size]]:
    if run is None or run.memory is None:
        return [(0, value.shape)]
    first = int(value.storage_offset())
    return [(int(part.storage_offset()) - first, part.shape) for part in run.parts(value)]

"""Optimizers by a kernel: it updates all tensors in one call, scattered or in flat memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.profiler import record_function

from accelcore.errors import TrainingError
from accelcore.optim.flat.memory import Run, unfit
from accelcore.optim.formulas import Formula
from accelcore_cpu.addresses import TYPES, Addresses, Found, Member

_NOTHING = nullcontext()
_NO_MEMORY = "a parameter has less memory than elements: its storage was resized"


class Native(Formula):
    """Formula computed by a kernel. A subclass has this class before the formula with the options, checks and state.

    The kernel reads gradients where backward left them. A step with a `grad_scale` divides them by it in memory, as
    torch's fused kernels do.
    """

    kernel: ClassVar[str]  # its name in kernels/kernels.cpp, which is the registry's
    states: ClassVar[tuple[str, ...]]  # the names of its state, in the order of kernels/elementwise.h and normed.h
    by_row: ClassVar[bool] = False  # whether it looks at each row of a matrix
    _step_supports_amp_scaling = True
    _addresses: Addresses | None = None
    _wanted: Sequence[tuple[str, ...]] = ()
    _runs: Sequence[Run] = ()
    _found: Found | None = None

    @staticmethod
    def numbers(group: dict[str, Any]) -> tuple[float, ...]:
        """Return the options of a group, in the order in which its struct in kernels/*.h reads them."""
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._addresses = None

    def place_runs(self, runs: Sequence[Run]) -> None:
        """Update these runs from now on. Their values replace the parameters in the groups."""
        self._runs, self._addresses = runs, None

    def update(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        found = self._find_gradients() if self._found is None else self._found
        self._found = None
        addresses, copies = self._addresses, list[tuple[Tensor, Tensor]]()
        if addresses is None or found is Found.REPLACED:
            addresses = self._bind_memory()
            found = addresses.find(self.param_groups, self.state)
        if found is not Found.ALL:
            addresses, copies = self._find_one_by_one(addresses)
        numbers = [self.numbers(group) for group in self.param_groups]
        with record_function(f"accelcore::{self.kernel}") if torch._C._autograd._profiler_enabled() else _NOTHING:
            if found_inf is None or found_inf.item() == 0:
                addresses.step(numbers, 1.0 if grad_scale is None else grad_scale.item())
        addresses.release()
        if grad_scale is not None:
            for gradient, copy in copies:
                gradient.copy_(copy)

    def replaced(self) -> bool:
        """Return whether a tensor changed its memory since the last step. The next `update` uses the result."""
        self._found = self._find_gradients()
        return self._found is Found.REPLACED

    def _find_gradients(self) -> Found:
        """Find the gradients, if groups and state still have the tensors that the kernel was bound to."""
        wanted = [tuple(self.initial_state(group)) for group in self.param_groups]
        if self._addresses is None or wanted != self._wanted:
            return Found.REPLACED
        return self._addresses.find(self.param_groups, self.state)

    def _find_one_by_one(self, addresses: Addresses) -> tuple[Addresses, list[tuple[Tensor, Tensor]]]:
        """Find gradients one by one; copy each that the kernel cannot read in its memory."""
        gradients: list[Any] = [member.value.grad for member in addresses.members]
        if any(g is not None and g.dtype is not m.gradient for g, m in zip(gradients, addresses.members, strict=True)):
            addresses = self._bind_memory()
        copies: list[tuple[Tensor, Tensor]] = []
        addresses.place([_address(*pair, copies) for pair in zip(gradients, addresses.members, strict=True)])
        return addresses, copies

    def _bind_memory(self) -> Addresses:
        """Bind the kernel to the memory of parameters and state as it is now."""
        self._addresses = None  # if a tensor is refused, the next step begins here again
        values = [value for group in self.param_groups for value in group["params"]]
        if reason := refusal(values, by_row=self.by_row):
            raise TrainingError(
                reason,
                why="a parameter was given other data",
                remedy="make a new optimizer for the parameters as they are",
            )
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
        self._addresses = Addresses(self.kernel, members, list(self.state.values()), by_row=self.by_row)
        return self._addresses

    def _fitted(self, group: dict[str, Any], value: Tensor) -> dict[str, Any]:
        """Return the state of a tensor as the kernel takes it: in its layout, and of one dtype."""
        is_new = not self.state.get(value)
        entry = self.entry(group, value)
        if is_new:
            return entry
        dtype = self.state_dtype(group, value)
        for name in self.states:
            state = entry.get(name)
            if state is None:
                continue
            if state.shape != value.shape:
                raise TrainingError(
                    f"a parameter has the shape {tuple(value.shape)}, and its state {name!r} {tuple(state.shape)}",
                    why="the parameter was given other data since its state was made",
                    remedy="make a new optimizer after a change of shape, or delete the parameter's state",
                )
            if _lacks_memory(state):
                raise TrainingError(
                    f"the state {name!r} of a parameter has less memory than elements",
                    why="its storage was resized",
                    remedy="give the storage its size and values again, or delete the parameter's state",
                )
            if (state.dtype, state.stride(), state.device) != (dtype, value.stride(), value.device) or state.is_neg():
                entry[name] = torch.empty_like(value, dtype=dtype).copy_(state)
        step: Any = entry.get("step")
        if self.counts and not (isinstance(step, Tensor) and step.dtype is torch.float32 and step.device.type == "cpu"):
            entry["step"] = torch.tensor(float(step), dtype=torch.float32)
        return entry


def refusal(values: Sequence[Tensor], *, by_row: bool) -> str | None:
    """Return why a kernel, which looks at each row of a matrix if `by_row`, cannot update these tensors, or None."""
    for value in values:
        if value.dtype not in TYPES:
            return f"the kernel takes real floating-point parameters, not {value.dtype}"
        if value.device.type != "cpu":
            return f"the kernel takes parameters on the CPU, not on {value.device}"
        if value.is_neg():
            return "a parameter has torch's negative bit; store its values by parameter.data.resolve_neg()"
        if by_row and _scatters_rows(value):
            return "the kernel takes matrices whose rows lie one after the other in memory"
    return unfit(values) or next((_NO_MEMORY for value in values if _lacks_memory(value)), None)


def _lacks_memory(tensor: Tensor) -> bool:
    """Return whether a tensor ends behind its memory, because that was resized: torch does not check it."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() < end


def _scatters_rows(value: Tensor) -> bool:
    if value.dim() < 2 or not value.numel() or value.shape[0] == 1:
        return False
    return value.stride(0) != value.numel() // value.shape[0]


def _address(gradient: Any, member: Member, copies: list[tuple[Tensor, Tensor]]) -> int:
    """Return the address of a gradient, or of a copy in its tensor's layout; 0 for None."""
    if gradient is None:
        return 0
    value = member.value
    if gradient.layout is not torch.strided:
        raise TrainingError(
            "a gradient is sparse, and the kernel would take its memory for a dense one",
            remedy='create the embedding with sparse=False, or the optimizer by name "sparseadam", or "sgd" with '
            'route="loop"',
        )
    if gradient.shape != value.shape:
        raise TrainingError(
            f"a gradient has the shape {tuple(gradient.shape)}, and its parameter {tuple(value.shape)}",
            remedy="clear gradients after a change of the parameter's shape, and call backward again",
        )
    without_memory = gradient._is_zerotensor()  # torch's zeros that are never written to
    if not without_memory and _lacks_memory(gradient):
        raise TrainingError(
            "a gradient has less memory than elements: its storage was resized",
            remedy="clear the gradients, and call backward again",
        )
    as_value = gradient.stride() == value.stride() and gradient.device == value.device
    if without_memory or gradient.is_neg() or not as_value:
        copy = torch.empty_like(value, dtype=gradient.dtype).copy_(gradient)
        copies.append((copy if without_memory else gradient, copy))
        gradient = copy
    return int(gradient.data_ptr()) or 1  # without elements: any address


def _parts(value: Tensor, run: Run | None) -> Sequence[tuple[int, torch.Size]]:
    if run is None or run.memory is None:
        return [(0, value.shape)]
    first = int(value.storage_offset())
    return [(int(part.storage_offset()) - first, part.shape) for part in run.parts(value)]

"""Optimizers by a kernel: it updates all tensors in one call, scattered or in flat memory.

`Native` is the optimizer. `Addresses` holds the addresses that its kernel reads and writes, and checks before each step
that they are still right.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.profiler import record_function

from accelcore.errors import TrainingError
from accelcore.optim.flat.memory import Run, unfit
from accelcore.optim.formulas import Formula
from accelcore_cpu.kernels.library import load

TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
"""The dtypes that kernels take, by their numbers in kernels/memory.h."""

_STATES = 3
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
            entry["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
        return entry


class Found(IntEnum):
    """Result of the search for the next gradients, by the numbers in kernels/tensors.cpp."""

    ALL = 0
    REPLACED = 1
    """A tensor has other memory or another layout than it had, or one that waited has its first gradient."""
    UNLIKE = 2
    """A gradient is not laid out as its value."""


_FOUND = tuple(Found)  # to look up a member takes a tenth of the time that Found(number) takes


@dataclass
class Member:
    """A tensor that is updated."""

    group: int  # the number of its group
    value: Tensor  # dense, and of one of `TYPES`
    gradient: torch.dtype  # of its gradients
    entry: dict[str, Any]  # its state
    states: Sequence[Tensor | None]  # its elementwise state, in the kernel's order; None for one that is not used
    parts: Sequence[tuple[int, torch.Size]]  # offsets and shapes of its parameters, if the kernel tells them apart
    waits: bool  # whether it has had no gradient yet, and so no state


class Addresses:
    """Addresses of the tensors that one kernel updates; `entries` are all state of the optimizer."""

    def __init__(
        self, kernel: str, members: Sequence[Member], entries: Sequence[dict[str, Any]], *, by_row: bool
    ) -> None:
        self.members = members
        values = [member.value for member in members]
        # Held, as members are, so that torch gives no other tensor the address of one of these.
        self._held = list[Any](chain(values, chain.from_iterable(map(dict.values, entries))))
        self._own_dtype = all(member.gradient is member.value.dtype for member in members)
        sources, parts = array("q"), array("q")
        for member in members:
            sources.extend(_source(member, len(parts) // 4))
            for offset, shape in member.parts:
                parts.extend(_tensor(offset, shape, by_row))
        held = array("q", map(id, self._held))  # in CPython their addresses
        objects = array("q", [each._cdata if isinstance(each, Tensor) else 0 for each in self._held])
        waits = bytes(member.waits for member in members)
        self._library = load()
        tables = _memory(sources), len(members), _memory(parts), len(parts) // 4
        self._plan = self._made("plan", kernel.encode(), _fork(), *tables)
        self._tensors = self._made("tensors", _memory(held), _memory(objects), len(held), waits, len(waits))
        self._addresses = array("q", bytes(8 * len(members)))

    def _made(self, what: str, *arguments: Any) -> int:
        """Return what the library makes of the arguments, to be freed with this object."""
        made: int | None = getattr(self._library, f"{what}_new")(*arguments)
        if made is None:
            raise MemoryError("there is no memory for the tables of an optimizer")
        weakref.finalize(self, getattr(self._library, f"{what}_free"), made)
        return made

    def find(self, groups: Sequence[dict[str, Any]], state: Mapping[Tensor, dict[str, Any]]) -> Found:
        """Look at the memory of all tensors in the groups and the state, and find the gradients for the next step."""
        values = [group["params"] for group in groups]
        number = self._library.tensors_find(self._tensors, values, state, "_cdata", _memory(self._addresses))
        found = _FOUND[number]
        return Found.UNLIKE if found is Found.ALL and not self._own_dtype else found

    def place(self, addresses: Sequence[int]) -> None:
        """Take these addresses of gradients for the next step; 0 for a tensor without gradient."""
        self._addresses = array("q", addresses)

    def step(self, numbers: Sequence[Sequence[float]], grad_scale: float) -> None:
        """Update all tensors that have a gradient, by the numbers of each group."""
        self._library.tensors_bump_versions(self._tensors, _memory(self._addresses))
        options = array("d", chain.from_iterable(numbers))
        done = self._library.plan_step(
            self._plan, _memory(self._addresses), _memory(options), len(numbers[0]), grad_scale, torch.get_num_threads()
        )
        if not done:
            raise MemoryError("there is no memory for the sums of an optimizer")

    def release(self) -> None:
        """Hold the gradients no longer."""
        self._library.tensors_release(self._tensors)


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


def _source(member: Member, first_tensor: int) -> list[int]:
    """Return a `Source` of kernels/plan.h."""
    states = [0 if state is None else state.data_ptr() for state in member.states]
    kind = next((TYPES[state.dtype] for state in member.states if state is not None), TYPES[member.value.dtype])
    return [
        member.value.data_ptr(),
        *states,
        *[0] * (_STATES - len(states)),
        member.entry["step"].data_ptr() if "step" in member.entry else 0,
        TYPES[member.value.dtype],
        kind,
        TYPES[member.gradient],
        member.group,
        first_tensor,
    ]


def _tensor(offset: int, shape: torch.Size, by_row: bool) -> list[int]:
    """Return a `Tensor` of kernels/plan.h."""
    if by_row and len(shape) > 1 and shape.numel():
        return [offset, shape[0], shape.numel() // shape[0], 1]
    return [offset, 1, shape.numel(), 0]


def _memory(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]


@cache
def _fork() -> int | None:
    """Return the function by which torch's OpenMP runtime starts threads; None if torch uses another runtime."""
    fork: Any = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return None if fork is None else ctypes.cast(fork, ctypes.c_void_p).value

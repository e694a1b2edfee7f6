"""Flat memory: the parameters of one dtype and device in one piece, so that one kernel updates them all.

A `Slot` is a trained parameter. A `Run` is what an optimizer updates as one: a parameter or a stretch of flat memory.

A parameter keeps its shape, its strides and a storage of its own within the piece: saving or copying it affects no
other. Gaps between parameters, for alignment, stay zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple
from weakref import ReferenceType, finalize, ref

import torch
from torch import Tensor, nn
from torch.utils import dlpack

from accelcore.errors import TrainingError
from accelcore.util.text import kind_of

__all__ = ["Run", "Slot"]

_ALIGNMENT = 512  # bytes: the alignment of tensors by allocators of accelerators, and a multiple of a CPU's cache line

_LARGE = 1 << 16
"""Elements. A gradient of this size or more is copied within backward, as the call costs little beside the copy."""


class Slot(NamedTuple):
    """Trained parameter.

    Attributes:
        name: as in `model.named_parameters()`; tied parameters have one slot.
        group: the number of its parameter group.
        parameter: the parameter of the model.
        trained: the tensor that the optimizer updates: the parameter or its fp32 master.
    """

    name: str
    group: int
    parameter: nn.Parameter
    trained: Tensor


class Run:
    """Tensor that an optimizer updates: a parameter, or a stretch of flat memory with several parameters.

    The parameters of a stretch share their history: all of them received a gradient in the same steps.

    Args:
        slots: its parameters, of one parameter group or of groups with equal options.
        value: the tensor; 1-D if there is a `memory`.
        gradient: has the layout of `value`; None if `value.grad` is set elsewhere.
        memory: the flat memory of which it is a stretch.
        first: the number of its first slot in that memory.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        value: Tensor,
        gradient: Tensor | None = None,
        memory: GradientMemory | None = None,
        first: int = 0,
    ) -> None:
        self.slots, self.value, self.gradient, self.memory = slots, value, gradient, memory
        self.group, self.first, self.last = slots[0].group, first, first + len(slots)

    @property
    def received(self) -> Sequence[bool]:
        """For each slot, whether it has a gradient now."""
        if self.memory is None:
            return [self.value.grad is not None]
        return self.memory.received[self.first : self.last]

    @property
    def groups(self) -> set[int]:
        """The numbers of its slots' groups; `group` is the first of them."""
        return {slot.group for slot in self.slots}

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """Return views, one for each slot, of a tensor with the layout of `value`."""
        return [tensor] if self.memory is None else self.memory.layout.views(tensor, self.first, self.last)

    def by_slot(self) -> list[Run]:
        """Return a run for each slot, in the shape of its parameter, for an optimizer that must tell them apart."""
        if self.memory is None:
            return [self]
        values = self.parts(self.value)
        gradients = [None] * len(values) if self.gradient is None else self.parts(self.gradient)
        columns = zip(self.slots, values, gradients, strict=True)
        return [Run([slot], value, grad, self.memory, n) for n, (slot, value, grad) in enumerate(columns, self.first)]

    def split(self, edges: Sequence[int]) -> list[Run]:
        """Split it before the slots with these numbers in its memory."""
        return [
            Run(
                self.slots[begin - self.first : end - self.first],
                self.cut(self.value, begin, end),
                None if self.gradient is None else self.cut(self.gradient, begin, end),
                self.memory,
                begin,
            )
            for begin, end in pairwise([self.first, *edges, self.last])
        ]

    def split_by(self, traits: Sequence[Any]) -> list[Run]:
        """Split it between neighbours with different traits, of which there is one for each slot."""
        edges = [self.first + n for n in range(1, len(traits)) if traits[n] != traits[n - 1]]
        return self.split(edges) if edges else [self]

    def cut(self, tensor: Tensor, first: int, last: int) -> Tensor:
        """Return the stretch, of a tensor with the layout of `value`, of the slots `first` to `last` (excluded)."""
        assert self.memory is not None
        begin, start, end = (self.memory.layout.offsets[number] for number in (self.first, first, last))
        return tensor[start - begin : end - begin]


class Layout:
    """Places of tensors in one piece of memory, in elements."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        unit = _ALIGNMENT // tensors[0].element_size()
        self.shapes = [tensor.shape for tensor in tensors]
        self.strides = [tensor.stride() for tensor in tensors]
        sizes = [-(-tensor.numel() // unit) * unit for tensor in tensors]
        self.offsets = [0, *accumulate(sizes)]
        """The begin of each tensor, and the end of the last."""

    def views(self, memory: Tensor, first: int = 0, last: int | None = None) -> list[Tensor]:
        """Return the tensors `first` to `last` (excluded) as views of `memory`, which begins with tensor `first`."""
        begin = self.offsets[first]
        return [
            memory.as_strided(self.shapes[number], self.strides[number], memory.storage_offset() + offset - begin)
            for number, offset in list(enumerate(self.offsets[:-1]))[first:last]
        ]


class GradientMemory:
    """The gradients of parameters of one dtype and device in one piece of memory.

    Backward allocates gradients, and `collect` copies them into the piece. So a gradient of None stays None, which an
    optimizer treats unlike zero. Large gradients are copied within backward: each is still in the cache then, and its
    memory is free for the next one. The owner sets `expects_gradients` while a backward pass computes gradients for it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        # In dense strides, which most have.
        self.layout = Layout([torch.empty_like(parameter, device="meta") for parameter in parameters])
        like, total = parameters[0], self.layout.offsets[-1]
        self._packed = torch.zeros(total + len(parameters), dtype=like.dtype, device=like.device)
        self._flags = self._packed[total:]
        self.gradients = self._packed[:total]
        self.views = self.layout.views(self.gradients)  # one for each parameter
        self.received = [False] * len(parameters)  # whether each parameter has a gradient
        self._has_gaps = total > sum(parameter.numel() for parameter in parameters)
        self.is_written = False  # whether others multiplied the piece as a whole: times inf, the gaps become nan
        self._kinds = self._kinds_now()
        self._large = [number for number, view in enumerate(self.views) if view.numel() >= _LARGE]
        self.copies_in_backward, self.expects_gradients = bool(self._large), False
        hooks = ExitStack()
        for number in self._large:
            arrived = partial(_arrived, ref(self), number)  # no reference: a hook lives as long as its parameter
            hook = parameters[number].register_post_accumulate_grad_hook(arrived)
            hooks.callback(hook.remove)
        finalize(self, hooks.close)

    def copy_gradient(self, number: int) -> None:
        """Copy a parameter's gradient into the piece, and make its `grad` a view of it."""
        parameter, view = self.parameters[number], self.views[number]
        gradient = parameter.grad
        if not self.expects_gradients or gradient is None or gradient is view:
            return
        if (gradient.layout, gradient.dtype, gradient.device) == (view.layout, view.dtype, view.device):
            view.copy_(gradient)
            parameter.grad = view

    @property
    def fits(self) -> bool:
        """Whether the parameters still have the dtype, device, strides and shape of the layout."""
        return self._kinds == self._kinds_now()

    def collect(self) -> None:
        """Copy the gradients into the piece, and zeros for gradients of None."""
        gradients = [parameter.grad for parameter in self.parameters]
        self.received = received = [gradient is not None for gradient in gradients]
        taken = {number for number in self._large if gradients[number] is self.views[number]}
        whole = all(received)
        if not whole or (self._has_gaps and self.is_written):
            if not taken:
                self.gradients.zero_()
            elif rest := self._rest(received):
                torch._foreach_zero_(rest)
            self.is_written = False
        if whole and not taken:
            _copy(self.views, gradients)
        elif any(received):
            numbers = [number for number, there in enumerate(received) if there and number not in taken]
            _copy([self.views[number] for number in numbers], [gradients[number] for number in numbers])

    def pack(self) -> Tensor:
        """Return the tensor for ranks to average: the piece, then for each parameter 1 if it has a gradient, else 0."""
        if all(self.received):
            self._flags.fill_(1)
        else:
            self._flags.copy_(torch.tensor(self.received, device="cpu"))
        return self._packed

    def unpack(self) -> None:
        """Read the averaged tensor of `pack`: a parameter has a gradient if it had one on any rank."""
        if not all(self.received):  # reading it makes the host wait
            self.received = (self._flags.real > 0).tolist()

    def expose(self, tensors: Iterable[Tensor]) -> None:
        """Set `grad` of each tensor, one for each parameter, to its gradient or None."""
        for tensor, view, received in zip(tensors, self.views, self.received, strict=True):
            tensor.grad = view if received else None

    def _rest(self, received: Sequence[bool]) -> list[Tensor]:
        """Return the parts of the piece without a gradient: views of missing gradients, and gaps."""
        absent = [view for view, there in zip(self.views, received, strict=True) if not there]
        ends = [offset + view.numel() for offset, view in zip(self.layout.offsets, self.views, strict=False)]
        gaps = [self.gradients[end:begin] for end, begin in zip(ends, self.layout.offsets[1:], strict=True)]
        return [*absent, *(gap for gap in gaps if gap.numel())]

    def _kinds_now(self) -> list[tuple[Any, ...]]:
        return [(each.dtype, each.device, each.stride(), each.shape) for each in self.parameters]


class FlatMemory(GradientMemory):
    """Parameters of one dtype and device in one piece of memory (`values`), their gradients in another, laid out alike.

    Slots that are to be updated as one must be adjacent; `joint`: see `lay_flat`.
    """

    def __init__(self, slots: Sequence[Slot], joint: Sequence[int]) -> None:
        super().__init__([slot.parameter for slot in slots])
        self.slots = slots
        self._kernels = [joint[slot.group] for slot in slots]
        self.values = torch.zeros_like(self.gradients)
        self._places = [_own_storage(view) for view in self.layout.views(self.values)]
        self._move_parameters(range(len(slots)))

    def refresh(self) -> None:
        """Copy back parameters that got other memory, by `model.to`, `load_state_dict(assign=True)` or another trainer.

        TrainingError: one has another dtype, device or shape now.
        """
        now = self._places_now()
        if now != self._placed:
            pairs = enumerate(zip(zip(*now, strict=True), zip(*self._placed, strict=True), strict=True))
            self._move_parameters([number for number, (place, before) in pairs if place != before])

    def runs(self, values: Tensor, gradients: Tensor) -> list[Run]:
        """Return the runs that may be updated as one, over pieces with this layout."""
        return Run(self.slots, values, gradients, self).split_by(self._kernels)

    def _move_parameters(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            parameter, place = self.parameters[number], self._places[number]
            if (parameter.dtype, parameter.device, parameter.shape) != (place.dtype, place.device, place.shape):
                raise TrainingError(
                    f"the parameter {self.slots[number].name!r} is {parameter.dtype} of shape {tuple(parameter.shape)} "
                    f"on {parameter.device}, and was {place.dtype} of shape {tuple(place.shape)} on {place.device}",
                    why="it was changed after training began",
                    remedy="move and cast the model first, then make optimizer and trainer",
                )
            place.copy_(parameter.detach())
            parameter.data = place
        self._placed = self._places_now()

    def _places_now(self) -> tuple[list[Any], ...]:
        # Also sizes: `weight.data = weight.data[:1]` keeps the address. `ModelSnapshot` compares strides.
        return list(map(Tensor.data_ptr, self.parameters)), list(map(Tensor.numel, self.parameters))


def lay_flat(slots: Sequence[Slot], joint: Sequence[int]) -> list[FlatMemory]:
    """Lay parameters out in a piece for each dtype and device.

    `joint`: for each group, the number of the first group with which it may be updated as one, or its own.
    """

    def place(slot: Slot) -> tuple[int, int]:
        return joint[slot.group], slot.group

    with torch.no_grad():
        return [FlatMemory(sorted(alike, key=place), joint) for alike in by_kind(slots)]


def by_kind(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Group parameters by dtype and device."""
    alike: dict[tuple[torch.dtype, torch.device], list[Slot]] = defaultdict(list)
    for slot in slots:
        alike[slot.parameter.dtype, slot.parameter.device].append(slot)
    return list(alike.values())


def unfit(parameters: Sequence[Tensor]) -> str | None:
    """Return why these parameters cannot be laid flat, or None."""
    for parameter in parameters:
        plain = parameter.data
        if type(plain) is not Tensor or plain.layout is not torch.strided:
            return f"a parameter is {kind_of(plain)} of layout {plain.layout}, not a plain dense tensor"
        if torch.empty_like(plain).stride() != plain.stride():
            return "a parameter has gaps in its memory, or overlaps itself"
    distinct = {id(parameter): parameter for parameter in parameters if parameter.numel()}.values()
    spans = sorted((str(p.device), p.data_ptr(), p.data_ptr() + p.nbytes) for p in distinct)
    if any(one[0] == other[0] and one[2] > other[1] for one, other in pairwise(spans)):
        return "two parameters share memory"
    return None


def _own_storage(view: Tensor) -> Tensor:
    """Return the same memory as a tensor with a storage of its own, if the device supports DLPack."""
    if not view.numel():
        return view
    # Every exporter describes 1-D tensors well.
    elements = view.as_strided((view.numel(),), (1,), view.storage_offset())
    try:
        # Looked up at the call: a device's package may replace this function when it is imported.
        return dlpack.from_dlpack(elements).as_strided(view.shape, view.stride())
    except (BufferError, RuntimeError, NotImplementedError, TypeError, ValueError):
        return view  # also correct, but torch.save then saves the whole piece with each parameter


def _arrived(memory: ReferenceType[GradientMemory], number: int, parameter: nn.Parameter) -> None:
    alive = memory()
    if alive is not None:
        alive.copy_gradient(number)


def _copy(views: list[Tensor], gradients: list[Any]) -> None:
    if not views:
        return
    try:
        torch._foreach_copy_(views, gradients)
    except (RuntimeError, NotImplementedError) as error:
        if any(gradient.layout is not torch.strided for gradient in gradients):
            raise TrainingError(
                "a gradient is sparse, which flat memory cannot hold",
                remedy='make the embedding with sparse=False, or use flat=False and an optimizer with route="loop"',
            ) from error
        raise

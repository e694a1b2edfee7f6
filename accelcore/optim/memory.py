"""Flat memory: many tensors in one piece, so that one kernel serves them all.

A parameter keeps its shape and strides, and a storage of its own within the piece: saving, copying or comparing it
touches no other. What is between two tensors, for alignment, stays zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple
from weakref import ReferenceType, finalize, ref

import torch
from torch import Tensor, nn
from torch.utils import dlpack
from torch.utils.hooks import RemovableHandle

from accelcore.errors import TrainingError

__all__ = ["FlatMemory", "GradientMemory", "Layout", "Run", "Slot", "by_kind", "lay_flat", "unfit"]

_ALIGNMENT = 512
"""Bytes. What allocators of accelerators align a tensor to, and a multiple of a CPU's cache line."""

_LARGE = 1 << 16
"""Elements from which on a gradient is taken in by itself: calling what does that costs little beside copying it."""


class Slot(NamedTuple):
    """One parameter that is trained.

    Attributes:
        name: as in `model.named_parameters()`; tied parameters have one slot.
        group: the number of its parameter group.
        parameter: what forward and backward use.
        trained: what the optimizer updates: the parameter itself, or its fp32 master.
    """

    name: str
    group: int
    parameter: nn.Parameter
    trained: Tensor


class Layout:
    """Where each of several tensors lies in one piece of memory, in elements."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        unit = _ALIGNMENT // tensors[0].element_size()
        self.shapes = [tensor.shape for tensor in tensors]
        self.strides = [tensor.stride() for tensor in tensors]
        sizes = [-(-tensor.numel() // unit) * unit for tensor in tensors]
        self.offsets = [0, *accumulate(sizes)]
        """Where each begins, and after the last where all end."""

    def views(self, memory: Tensor, first: int = 0, last: int | None = None) -> list[Tensor]:
        """The tensors `first` to `last` (not included) as views of `memory`, which begins with the first of them."""
        begin = self.offsets[first]
        return [
            memory.as_strided(self.shapes[number], self.strides[number], memory.storage_offset() + offset - begin)
            for number, offset in list(enumerate(self.offsets[:-1]))[first:last]
        ]


class Run:
    """What an optimizer updates as one: a tensor, or a stretch of flat memory whose parameters share their history.

    Parameters share it as long as all of them received a gradient in the same steps.

    Args:
        slots: theirs, all of one parameter group, or of groups with equal options.
        value: what is updated; 1-D where there is a `memory`.
        gradient: laid out as `value`; None where `value.grad` is set elsewhere.
        memory: what it is a stretch of.
        first: the number of its first slot in that memory.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        value: Tensor,
        gradient: Tensor | None = None,
        memory: FlatMemory | None = None,
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
        """The numbers of its slots' groups; its own is the first of them."""
        return {slot.group for slot in self.slots}

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """A tensor that is laid out as `value`, seen as one tensor for each slot."""
        return [tensor] if self.memory is None else self.memory.layout.views(tensor, self.first, self.last)

    def split(self, edges: Sequence[int]) -> list[Run]:
        """The stretches between its beginning, the slots of these numbers in its memory, and its end."""
        return [self._between(begin, end) for begin, end in pairwise([self.first, *edges, self.last])]

    def by_slot(self) -> list[Run]:
        """A run for each slot, in the shape of its parameter, for an optimizer that must tell parameters apart."""
        if self.memory is None:
            return [self]
        values = self.parts(self.value)
        gradients = [None] * len(values) if self.gradient is None else self.parts(self.gradient)
        places = enumerate(zip(self.slots, values, gradients, strict=True), self.first)
        return [Run([slot], value, gradient, self.memory, number) for number, (slot, value, gradient) in places]

    def cut(self, tensor: Tensor, part: Run) -> Tensor:
        """What of a tensor laid out as `value` belongs to `part`, one of those that `split` gave."""
        assert self.memory is not None
        begin, start, end = (self.memory.layout.offsets[number] for number in (self.first, part.first, part.last))
        return tensor[start - begin : end - begin]

    def _between(self, begin: int, end: int) -> Run:
        part = Run(self.slots[begin - self.first : end - self.first], self.value, None, self.memory, begin)
        part.value = self.cut(self.value, part)
        part.gradient = None if self.gradient is None else self.cut(self.gradient, part)
        return part


class GradientMemory:
    """The gradients of parameters of one dtype and device in one piece of memory.

    Backward leaves gradients where it likes; `gather` copies them into the piece. So a gradient that is None stays
    that, which an optimizer tells from zero. Large ones are taken in during `backward`, each as soon as it is there:
    it is in the cache then, and the next has its memory.

    Attributes:
        parameters: whose they are.
        layout: of the piece.
        gradients: the piece.
        views: it, seen parameter by parameter.
        received: for each parameter, whether it has a gradient.
        takes_in: whether it takes in gradients during backward.
        receives: whether what backward leaves on the parameters now are the gradients for this piece; to be set.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        # As they would be laid out densely, which most are.
        self.layout = Layout([torch.empty_like(parameter, device="meta") for parameter in parameters])
        like, total = parameters[0], self.layout.offsets[-1]
        self._packed = torch.zeros(total + len(parameters), dtype=like.dtype, device=like.device)
        self._flags = self._packed[total:]
        self.gradients = self._packed[:total]
        self.views = self.layout.views(self.gradients)
        self.received = [False] * len(parameters)
        self._has_gaps = total > sum(parameter.numel() for parameter in parameters)
        self._kinds = self._look()
        self._large = [number for number, view in enumerate(self.views) if view.numel() >= _LARGE]
        self.takes_in, self.receives = bool(self._large), False
        # What a hook of a parameter holds lives as long as that, so these hold nothing.
        hooks = [
            parameters[number].register_post_accumulate_grad_hook(partial(_arrived, ref(self), number))  # type: ignore[no-untyped-call]
            for number in self._large
        ]
        finalize(self, _remove, hooks)

    def take_in(self, number: int) -> None:
        """Take in the gradient of a parameter, which shows that from now on and goes on to be added to there."""
        parameter, view = self.parameters[number], self.views[number]
        gradient = parameter.grad
        if not self.receives or gradient is None or gradient is view:
            return
        if (gradient.layout, gradient.dtype, gradient.device) == (view.layout, view.dtype, view.device):
            view.copy_(gradient)
            parameter.grad = view

    @property
    def fits(self) -> bool:
        """Whether the parameters still have the dtype, device and strides that it was laid out for."""
        return self._kinds == self._look()

    def gather(self) -> None:
        """Copy the gradients into their piece; zeros where there is none."""
        gradients = [parameter.grad for parameter in self.parameters]
        self.received = received = [gradient is not None for gradient in gradients]
        taken = {number for number in self._large if gradients[number] is self.views[number]}
        whole = all(received)
        # The gaps, too: an overflow that was clipped is nan everywhere.
        if taken:
            _clear(self._rest(received))
        elif self._has_gaps or not whole:
            self.gradients.zero_()
        if whole and not taken:
            _copy(self.views, gradients)
        elif any(received):
            numbers = [number for number, there in enumerate(received) if there and number not in taken]
            _copy([self.views[number] for number in numbers], [gradients[number] for number in numbers])

    def pack(self) -> Tensor:
        """The piece, and behind it for each parameter a 1 where it has a gradient: what ranks exchange."""
        if all(self.received):
            self._flags.fill_(1)
        else:
            self._flags.copy_(torch.tensor(self.received))
        return self._packed

    def unpack(self) -> None:
        """Ranks have made what `pack` gave their mean: a parameter has a gradient where it had one on any of them."""
        if not all(self.received):  # only then the host has to wait
            self.received = (self._flags > 0).tolist()

    def expose(self, tensors: Iterable[Tensor]) -> None:
        """Give each of as many tensors its gradient as `grad`, or None."""
        for tensor, view, received in zip(tensors, self.views, self.received, strict=True):
            tensor.grad = view if received else None

    def _rest(self, received: Sequence[bool]) -> list[Tensor]:
        """What of the piece belongs to no gradient: of those that were not received, and the gaps."""
        absent = [view for view, there in zip(self.views, received, strict=True) if not there]
        ends = [offset + view.numel() for offset, view in zip(self.layout.offsets, self.views, strict=False)]
        gaps = [self.gradients[end:begin] for end, begin in zip(ends, self.layout.offsets[1:], strict=True)]
        return [*absent, *(gap for gap in gaps if gap.numel())]

    def _look(self) -> list[tuple[Any, ...]]:
        return [(parameter.dtype, parameter.device, parameter.stride()) for parameter in self.parameters]


class FlatMemory(GradientMemory):
    """Parameters of one dtype and device in one piece of memory, and their gradients in another, laid out alike.

    Args:
        slots: those that may be updated as one side by side. Each parameter's memory is replaced by its place in the
            piece.
        together: for each group, the number of the one that it may be updated with; none: each by itself.

    Attributes:
        values: the piece of the parameters.
    """

    def __init__(self, slots: Sequence[Slot], together: Sequence[int] = ()) -> None:
        super().__init__([slot.parameter for slot in slots])
        self.slots = slots
        self._kernels = [together[slot.group] if together else slot.group for slot in slots]
        self.values = torch.zeros_like(self.gradients)
        self._places = [_own_storage(view) for view in self.layout.views(self.values)]
        self._take_in(range(len(slots)))

    def follow(self) -> bool:
        """Take in what was given other memory since: by `model.to`, `load_state_dict(assign=True)`, another trainer.

        Returns:
            Whether there was any.

        Raises:
            TrainingError: it has another dtype, device or shape now.
        """
        addresses = [parameter.data_ptr() for parameter in self.parameters]
        if addresses == self._addresses:
            return False
        pairs = enumerate(zip(addresses, self._addresses, strict=True))
        self._take_in([number for number, (now, before) in pairs if now != before])
        return True

    def runs(self, values: Tensor, gradients: Tensor) -> list[Run]:
        """A run for what may be updated as one, over pieces that are laid out as these."""
        whole = Run(self.slots, values, gradients, self)
        return whole.split([n for n in range(1, len(self.slots)) if self._kernels[n] != self._kernels[n - 1]])

    def _take_in(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            parameter, place = self.parameters[number], self._places[number]
            if (parameter.dtype, parameter.device, parameter.shape) != (place.dtype, place.device, place.shape):
                raise TrainingError(
                    f"the parameter {self.slots[number].name!r} is {parameter.dtype} of shape {tuple(parameter.shape)} "
                    f"on {parameter.device}, and was {place.dtype} of shape {tuple(place.shape)} on {place.device}",
                    why="it was changed after its training began",
                    remedy="move and cast the model before the trainer or the optimizer is made, or make a new one",
                )
            place.copy_(parameter.detach())
            parameter.data = place
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]


def lay_flat(slots: Sequence[Slot], together: Sequence[int] = ()) -> list[FlatMemory]:
    """One piece of memory for each dtype and device among the parameters; `together` as for `FlatMemory`."""

    def place(slot: Slot) -> tuple[int, int]:
        return (together[slot.group] if together else slot.group, slot.group)

    with torch.no_grad():
        return [FlatMemory(sorted(alike, key=place), together) for alike in by_kind(slots)]


def by_kind(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Those of one dtype and device together."""
    alike: dict[tuple[torch.dtype, torch.device], list[Slot]] = defaultdict(list)
    for slot in slots:
        alike[slot.parameter.dtype, slot.parameter.device].append(slot)
    return list(alike.values())


def unfit(parameters: Sequence[Tensor]) -> str | None:
    """Why these cannot be laid flat; None where they can."""
    for parameter in parameters:
        plain = parameter.data
        if type(plain) is not Tensor or plain.layout is not torch.strided:
            return f"a parameter is a {type(plain).__name__} of layout {plain.layout}, not a plain dense tensor"
        if torch.empty_like(plain).stride() != plain.stride():
            return "a parameter has gaps in its memory, or meets it twice"
    distinct = {id(parameter): parameter for parameter in parameters if parameter.numel()}.values()
    spans = sorted((str(p.device), p.data_ptr(), p.data_ptr() + p.nbytes) for p in distinct)
    if any(one[0] == other[0] and one[2] > other[1] for one, other in pairwise(spans)):
        return "two parameters share memory, and each would get its own"
    return None


def _arrived(memory: ReferenceType[GradientMemory], number: int, parameter: nn.Parameter) -> None:
    alive = memory()
    if alive is not None:
        alive.take_in(number)


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _clear(tensors: list[Tensor]) -> None:
    if tensors:
        torch._foreach_zero_(tensors)


def _copy(views: list[Tensor], gradients: list[Any]) -> None:
    if not views:
        return
    try:
        torch._foreach_copy_(views, gradients)
    except (RuntimeError, NotImplementedError) as error:
        if any(gradient.layout is not torch.strided for gradient in gradients):
            raise TrainingError(
                "a gradient is sparse, which flat memory cannot hold",
                remedy='make the embedding with sparse=False, or say flat=False and make the optimizer by route="loop"',
            ) from error
        raise


def _own_storage(view: Tensor) -> Tensor:
    """The same memory as a tensor whose storage ends where it ends, where the device can exchange memory so."""
    if not view.numel():
        return view
    elements = view.as_strided((view.numel(),), (1,), view.storage_offset())  # 1-D, which every exporter describes well
    try:
        # Looked up now, because a device's package may teach this function about its memory when it is imported.
        return dlpack.from_dlpack(elements).as_strided(view.shape, view.stride())
    except (BufferError, RuntimeError, NotImplementedError, TypeError, ValueError):
        return view  # right all the same: only what is saved with torch.save then drags the whole piece along

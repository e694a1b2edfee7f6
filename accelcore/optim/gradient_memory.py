"""The gradients of many parameters in one piece of memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import ReferenceType, finalize, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from accelcore.errors import TrainingError

__all__ = ["GradientMemory", "Layout"]

_ALIGNMENT = 512
"""Bytes. What allocators of accelerators align a tensor to, and a multiple of a CPU's cache line."""

_LARGE = 1 << 16
"""Elements from which on a gradient is taken in by itself: calling what does that costs little beside copying it."""


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


class GradientMemory:
    """The gradients of parameters of one dtype and device in one piece of memory.

    Backward leaves gradients where it likes; `collect` copies them into the piece. So a gradient that is None stays
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

    def collect(self) -> None:
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

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
"""Bytes: the alignment of tensors by allocators of accelerators, and a multiple of a CPU's cache line."""

_LARGE = 1 << 16
"""Elements. A gradient of this size or more is copied within backward, as the call costs little beside the copy."""


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
    memory is free for the next one.

    Attributes:
        parameters: the parameters.
        layout: the layout of the piece.
        gradients: the piece.
        views: the piece as one tensor for each parameter.
        received: for each parameter, whether it has a gradient.
        takes_in: whether it copies gradients within backward.
        receives: whether the gradients of the current backward are for this piece; to be set by its owner.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        # In dense strides, which most have.
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
        # The hooks hold no reference to this object, because they live as long as the parameters.
        hooks = [
            parameters[number].register_post_accumulate_grad_hook(partial(_arrived, ref(self), number))  # type: ignore[no-untyped-call]
            for number in self._large
        ]
        finalize(self, _remove, hooks)

    def take_in(self, number: int) -> None:
        """Copy a parameter's gradient into the piece, and make its `grad` a view of it."""
        parameter, view = self.parameters[number], self.views[number]
        gradient = parameter.grad
        if not self.receives or gradient is None or gradient is view:
            return
        if (gradient.layout, gradient.dtype, gradient.device) == (view.layout, view.dtype, view.device):
            view.copy_(gradient)
            parameter.grad = view

    @property
    def fits(self) -> bool:
        """Whether the parameters still have the dtype, device and strides of the layout."""
        return self._kinds == self._look()

    def collect(self) -> None:
        """Copy the gradients into the piece, and zeros for gradients of None."""
        gradients = [parameter.grad for parameter in self.parameters]
        self.received = received = [gradient is not None for gradient in gradients]
        taken = {number for number in self._large if gradients[number] is self.views[number]}
        whole = all(received)
        # Also the gaps: clipping makes them nan after an overflow.
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
        """Return the tensor for ranks to average: the piece, then for each parameter 1 if it has a gradient, else 0."""
        if all(self.received):
            self._flags.fill_(1)
        else:
            self._flags.copy_(torch.tensor(self.received))
        return self._packed

    def unpack(self) -> None:
        """Read the averaged tensor of `pack`: a parameter has a gradient if it had one on any rank."""
        if not all(self.received):  # reading it makes the host wait
            self.received = (self._flags > 0).tolist()

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
                remedy='make the embedding with sparse=False, or use flat=False and an optimizer with route="loop"',
            ) from error
        raise

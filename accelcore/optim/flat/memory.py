"""Flat memory: the parameters of one dtype and device in one piece, so that one kernel updates them all.

A parameter keeps its shape, its strides and a storage of its own within the piece: saving or copying it affects no
other. Gaps between parameters, for alignment, stay zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils import dlpack

from accelcore.errors import TrainingError
from accelcore.optim.flat.gradients import GradientMemory
from accelcore.optim.flat.runs import Run, Slot
from accelcore.util.text import kind_of

__all__ = ["FlatMemory", "by_kind", "lay_flat", "unfit"]


class FlatMemory(GradientMemory):
    """Parameters of one dtype and device in one piece of memory, and their gradients in another, laid out alike.

    Args:
        slots: the parameters; those to be updated as one are adjacent. Each one's memory becomes a part of the
            piece.
        together: for each group, the number of the first group with which it may be updated as one; empty: none.

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

    def refresh(self) -> bool:
        """Copy back parameters that got other memory, by `model.to`, `load_state_dict(assign=True)` or another trainer.

        Returns:
            Whether there was one.

        Raises:
            TrainingError: a parameter has another dtype, device or shape now.
        """
        addresses = [parameter.data_ptr() for parameter in self.parameters]
        if addresses == self._addresses:
            return False
        pairs = enumerate(zip(addresses, self._addresses, strict=True))
        self._take_in([number for number, (now, before) in pairs if now != before])
        return True

    def runs(self, values: Tensor, gradients: Tensor) -> list[Run]:
        """Return the runs that may be updated as one, over pieces with this layout."""
        whole = Run(self.slots, values, gradients, self)
        return whole.split([n for n in range(1, len(self.slots)) if self._kernels[n] != self._kernels[n - 1]])

    def _take_in(self, numbers: Iterable[int]) -> None:
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
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]


def lay_flat(slots: Sequence[Slot], together: Sequence[int] = ()) -> list[FlatMemory]:
    """Lay parameters out in a piece for each dtype and device; `together` as for `FlatMemory`."""

    def place(slot: Slot) -> tuple[int, int]:
        return (together[slot.group] if together else slot.group, slot.group)

    with torch.no_grad():
        return [FlatMemory(sorted(alike, key=place), together) for alike in by_kind(slots)]


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
    elements = view.as_strided(
        (view.numel(),), (1,), view.storage_offset()
    )  # every exporter describes 1-D tensors well
    try:
        # Looked up at the call: a device's package may replace this function when it is imported.
        return dlpack.from_dlpack(elements).as_strided(view.shape, view.stride())
    except (BufferError, RuntimeError, NotImplementedError, TypeError, ValueError):
        return view  # also correct, but torch.save then saves the whole piece with each parameter

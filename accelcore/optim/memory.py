"""Flat memory: many tensors in one piece, so that one kernel serves them all.

A parameter keeps its shape and strides, and a storage of its own within the piece: saving, copying or comparing it
touches no other. What is between two tensors, for alignment, stays zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils import dlpack

from accelcore.errors import TrainingError
from accelcore.optim.gradient_memory import GradientMemory
from accelcore.optim.runs import Run, Slot
from accelcore.wording import kind_of

__all__ = ["FlatMemory", "by_kind", "lay_flat", "unfit"]


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

    def refresh(self) -> bool:
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
            return f"a parameter is {kind_of(plain)} of layout {plain.layout}, not a plain dense tensor"
        if torch.empty_like(plain).stride() != plain.stride():
            return "a parameter has gaps in its memory, or meets it twice"
    distinct = {id(parameter): parameter for parameter in parameters if parameter.numel()}.values()
    spans = sorted((str(p.device), p.data_ptr(), p.data_ptr() + p.nbytes) for p in distinct)
    if any(one[0] == other[0] and one[2] > other[1] for one, other in pairwise(spans)):
        return "two parameters share memory, and each would get its own"
    return None


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

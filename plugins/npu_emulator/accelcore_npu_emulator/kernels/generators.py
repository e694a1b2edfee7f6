"""Random numbers: a device generator's seed and offset determine each draw, so that restoring them replays it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from accelcore_npu_emulator.kernels.host_memory import CPU

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accelcore_npu_emulator.kernels.graph import Recorder

__all__ = ["Generators", "host_generator", "seeded"]

# A device kernel consumes its generator in steps of four, as Philox does.
_STEP = 4


class Generators:
    """Draws from the generators of the devices."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._captured = 0

    def draw(self, device: torch.device, generator: torch.Generator | None) -> tuple[int, int]:
        """The seed and offset of one kernel; the generator is advanced."""
        if self._recorder.tape is not None:
            # A generator cannot be read while a graph is captured. What is drawn now is thrown away: replays draw anew.
            self._captured += 1
            return 0, self._captured
        if generator is None:
            import torch_npu

            generator = torch_npu.npu.default_generators[device.index or 0]
        offset = generator.get_offset()
        generator.set_offset(offset + _STEP)
        return generator.initial_seed(), offset


def host_generator(seed: int, offset: int) -> torch.Generator:
    """The host generator that stands for a device generator at `offset`."""
    return torch.Generator(CPU).manual_seed((seed * 1_000_003 + offset) & 0x7FFF_FFFF_FFFF_FFFF)


@contextmanager
def seeded(generator: torch.Generator) -> Iterator[None]:
    """For kernels that take no generator: the host's own one is lent the state, and gets its state back."""
    state = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        yield
    finally:
        torch.default_generator.set_state(state)

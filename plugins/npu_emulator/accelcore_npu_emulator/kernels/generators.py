"""Random numbers: a device generator's seed and offset determine each draw, so that restoring them replays it.

torch_npu's generator keeps both. During a capture its state counts the graph's draws, and each replay advances the
generator by that number. The host draws the numbers: the device's kernels for it are not public.
"""

from __future__ import annotations

from contextlib import contextmanager
from hashlib import blake2b
from threading import Lock
from typing import TYPE_CHECKING

import torch

from accelcore_npu_emulator.kernels.host_memory import CPU

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accelcore_npu_emulator.kernels.graph import Recorder

# Most of torch_npu's kernels advance their generator by ten, rounded up to a multiple of four.
_INCREMENT = 12


class Generators:
    """Draws from the generators of the devices."""

    def __init__(self, recorder: Recorder) -> None:
        import torch_npu

        self._recorder = recorder
        self._npu = torch_npu.npu
        self._lock = Lock()

    def draw(self, device: torch.device, generator: torch.Generator | None) -> tuple[int, int]:
        """Return the seed and offset of one kernel, and advance the generator."""
        if self._recorder.replayed is not None:
            generator, offset = self._recorder.replayed.next_draw()
            return generator.initial_seed(), offset
        if generator is None:
            generator = self._npu.default_generators[device.index or 0]
        # The generator looks at the current device, and would wake it. No two threads draw the same.
        with self._npu.device(generator.device), self._lock:
            return self._advance(generator)

    def _advance(self, generator: torch.Generator) -> tuple[int, int]:
        if self._recorder.tape is None:
            offset = generator.get_offset()
            generator.set_offset(offset + _INCREMENT)
            return generator.initial_seed(), offset
        # During a capture, seed and offset can only be read and set as the whole state.
        state = generator.get_state()
        seed_and_offset = state.view(torch.int64)
        seed, offset = (int(word) for word in seed_and_offset)
        seed_and_offset[1] += _INCREMENT
        generator.set_state(state)
        self._recorder.tape.add_draw(generator, offset, offset + _INCREMENT)
        return seed, offset


def host_generator(seed: int, offset: int) -> torch.Generator:
    """Return the host generator for a device generator at `offset`. No seed of the host gives the same numbers."""
    digest = blake2b(f"emulated npu {seed} {offset}".encode(), digest_size=7).digest()
    return torch.Generator(CPU).manual_seed(int.from_bytes(digest, "little"))


@contextmanager
def seeded(generator: torch.Generator) -> Iterator[None]:
    """Give the host's default generator this state for kernels without a generator argument; restore it afterwards."""
    state = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        yield
    finally:
        torch.default_generator.set_state(state)

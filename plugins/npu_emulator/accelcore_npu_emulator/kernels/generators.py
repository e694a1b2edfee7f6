"""Random numbers: a device generator's seed and offset determine each draw, so that restoring them replays it.

torch_npu's own generator says them, also while a graph is captured, where they are numbers on the device that each
replay sets anew. What is drawn from them is the host's: the kernels of the device that turn them into numbers are not
public.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accelcore_npu_emulator.kernels.host_memory import CPU, view

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accelcore_npu_emulator.kernels.graph import Recorder

__all__ = ["Generators", "host_generator", "seeded"]

# By how much most of torch_npu's kernels advance their generator.
_INCREMENT = 10


class _PhiloxState(ctypes.Structure):
    """at_npu::PhiloxNpuState: numbers, or the addresses of tensors that hold them while a graph is captured."""

    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("offset_in_graph", ctypes.c_uint64),
        ("captured", ctypes.c_bool),
        ("on_secondary_stream", ctypes.c_bool),
    )


class Generators:
    """Draws from the generators of the devices."""

    def __init__(self, recorder: Recorder) -> None:
        import torch_npu

        self._recorder = recorder
        self._defaults = torch_npu.npu
        # Only C++ can ask a generator for its next numbers while a graph is captured.
        folder, wheel = Path(torch.__file__).parent / "lib", Path(torch_npu.__file__).parent / "lib"
        self._advance = ctypes.PyDLL(str(wheel / "libtorch_npu.so"))._ZN6at_npu16NPUGeneratorImpl16philox_npu_stateEm
        self._advance.argtypes, self._advance.restype = [ctypes.c_void_p, ctypes.c_uint64], _PhiloxState
        self._wrap = ctypes.PyDLL(str(folder / "libtorch_python.so"))._Z16THPVariable_WrapRKN2at10TensorBaseE
        self._wrap.argtypes, self._wrap.restype = [ctypes.c_void_p], ctypes.py_object

    def draw(self, device: torch.device, generator: torch.Generator | None) -> tuple[int, int]:
        """The seed and offset of one kernel; the generator is advanced."""
        if (recorded := self._recorder.recorded) is not None:
            return _numbers(*next(recorded))
        if generator is None:
            generator = self._defaults.default_generators[device.index or 0]
        # The Python object holds a pointer to the generator after its own header.
        state = self._advance(ctypes.c_void_p.from_address(id(generator) + object.__basicsize__).value, _INCREMENT)
        if self._recorder.tape is None:
            return int(state.seed), int(state.offset)
        draw = self._wrap(state.seed), self._wrap(state.offset), int(state.offset_in_graph)
        self._recorder.tape.draws.append(draw)
        return _numbers(*draw)


def _numbers(seed: Tensor, offset: Tensor, offset_in_graph: int) -> tuple[int, int]:
    return int(view(seed)), int(view(offset)) + offset_in_graph


def host_generator(seed: int, offset: int) -> torch.Generator:
    """The host generator that stands for a device generator at `offset`; no seed of the host gives the same numbers."""
    digest = blake2b(f"emulated npu {seed} {offset}".encode(), digest_size=7).digest()
    return torch.Generator(CPU).manual_seed(int.from_bytes(digest, "little"))


@contextmanager
def seeded(generator: torch.Generator) -> Iterator[None]:
    """For kernels that take no generator: the host's own one is lent the state, and gets its state back."""
    state = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        yield
    finally:
        torch.default_generator.set_state(state)

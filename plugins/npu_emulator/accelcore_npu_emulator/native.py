"""Python interface to the emulated CANN: counters and handlers."""

from __future__ import annotations

import ctypes
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from accelcore_npu_emulator.settings import Settings

_LIBRARY = "libascendcl.so"
_MARK = "accelcore_emulated_devices"  # a function that the vendor's library does not have
_OperatorHandler = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p)
_GraphHandler = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)


def opened(*, load: bool = False) -> ctypes.CDLL | None:
    """Return the emulator's libascendcl in this process, or None; with `load`, load it if none is loaded."""
    try:
        library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOW if load else os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return None
    return library if hasattr(library, _MARK) else None


def read_counters(library: ctypes.CDLL) -> dict[str, Counter[str]]:
    """Read all counters of this process, by the attributes of `counters.Cost`."""
    read = library.emulator_counters
    read.argtypes, read.restype = [ctypes.c_char_p, ctypes.c_size_t], ctypes.c_size_t
    size, needed = 0, 1
    while size < needed:  # another thread may count in between
        size = needed
        buffer = ctypes.create_string_buffer(size)
        needed = read(buffer, size)
    return {name: Counter(counts) for name, counts in json.loads(buffer.value).items()}


@dataclass(frozen=True)
class Native:
    """Interface between the host kernels and the emulated CANN.

    Each counting method uses the device. It raises RuntimeError if the process was forked after the NPU's start.
    """

    library: ctypes.CDLL  # the emulator's libascendcl
    settings: Settings  # of the emulated machine

    def count_launch(self, name: str) -> None:
        """Count one operator on the device."""
        if not self.library.emulator_count_launch(name.encode()):
            raise _forked()

    def count_synchronize(self, what: str) -> None:
        """Count one wait of the host for the device."""
        if not self.library.emulator_count_synchronize(what.encode()):
            raise _forked()

    def count_copy(self, direction: str, size: int) -> None:
        """Count one copy; `direction` is `"host to device"`, `"device to host"` or `"device to device"`."""
        if not self.library.emulator_count_copy(direction.encode(), ctypes.c_uint64(size)):
            raise _forked()

    def set_operator_handler(self, handler: Callable[[bytes, bytes, bytes, bytes], int]) -> None:
        """Set the function that executes one operator: (name, inputs, outputs, attributes), the last three in JSON."""
        self._keep(_OperatorHandler(handler), "emulator_set_operator_handler")

    def set_graph_handler(self, handler: Callable[[int, int, int, int], int]) -> None:
        """Set the function that records and replays graphs."""
        self._keep(_GraphHandler(handler), "emulator_set_graph_handler")

    def _keep(self, handler: object, setter: str) -> None:
        # The native side holds a bare pointer: the handler must live as long as the process.
        _handlers.append(handler)
        getattr(self.library, setter)(handler)


def _forked() -> RuntimeError:
    return RuntimeError(
        "EMULATED: this process was forked from one that had initialised the NPU, and cannot use it; start it with the "
        "'spawn' method"
    )


_handlers: list[object] = []

"""Python interface to the emulated CANN: counters and handlers."""

from __future__ import annotations

import ctypes
import json
import os
from collections import Counter
from collections.abc import Callable

_LIBRARY = "libascendcl.so"
_MARK = "accelcore_emulated_devices"  # a function that the vendor's library does not have
_OperatorHandler = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p)
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


def set_handlers(
    library: ctypes.CDLL,
    operator: Callable[[bytes, bytes, bytes], int],
    graph: Callable[[int, int, int, int], int],
) -> None:
    """Set the functions that execute one operator, and that record and replay graphs.

    The first one gets (name, inputs, outputs), the last two in JSON.
    """
    # The native side holds bare pointers: the handlers must live as long as the process.
    _handlers.extend((_OperatorHandler(operator), _GraphHandler(graph)))
    library.emulator_set_operator_handler(_handlers[0])
    library.emulator_set_graph_handler(_handlers[1])


_handlers: list[object] = []

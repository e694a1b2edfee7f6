"""Whether the CANN of this process is an emulated one, which imitates NPUs on the host. Free of torch.

An emulator is a distribution of its own, of which nothing is imported here. Its CANN is found as any CANN is, and says
what it is: its libascendcl also exports `accelcore_emulated_devices`, how many devices it imitates.
"""

from __future__ import annotations

import os

__all__ = ["devices", "wanted"]


def wanted() -> bool:
    """Whether this process is to run on an emulated NPU (`ACCEL_EMULATE=npu`)."""
    return os.environ.get("ACCEL_EMULATE") == "npu"


def devices() -> int | None:
    """How many NPUs the CANN of this process imitates: 0 where it refuses its settings, None where it imitates none.

    Looks at the library that is loaded. Where there is none yet it is loaded only if emulation is wanted, and only an
    emulated CANN is then expected in the search path.
    """
    import ctypes  # only here: it takes long beside a probe

    mode = os.RTLD_NOW if wanted() else os.RTLD_NOW | os.RTLD_NOLOAD
    try:
        library = ctypes.CDLL("libascendcl.so", mode=mode)
        return int(library.accelcore_emulated_devices())
    except (OSError, AttributeError):  # there is no such library, or no such function in it
        return None

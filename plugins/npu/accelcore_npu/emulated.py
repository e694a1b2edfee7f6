"""Detection of an emulated CANN, which imitates NPUs on the host. This module does not import torch.

The emulator is a separate distribution, and this module imports nothing of it. The loader finds its libascendcl like
any other. Its mark is the function `accelcore_emulated_devices`, which returns the number of devices.
"""

from __future__ import annotations

import os

__all__ = ["devices", "wanted"]


def wanted() -> bool:
    """Return whether the user asked for an emulated NPU (`ACCEL_EMULATE=npu`)."""
    return os.environ.get("ACCEL_EMULATE") == "npu"


def devices() -> int | None:
    """Return the number of NPUs that this process's CANN imitates.

    The number is 0 if the emulator refuses its settings, and None if the CANN is not emulated. A library that is not
    loaded yet is loaded only if `wanted()`: the search path should then lead to an emulated CANN.
    """
    import ctypes  # slow to import, compared with a probe

    mode = os.RTLD_NOW if wanted() else os.RTLD_NOW | os.RTLD_NOLOAD
    try:
        library = ctypes.CDLL("libascendcl.so", mode=mode)
        return int(library.accelcore_emulated_devices())
    except (OSError, AttributeError):  # the library or the function does not exist
        return None

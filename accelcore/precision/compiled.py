"""A mark on what is compiled under O1.

torch keeps compiled code on disk, by the code that it was made of and the state of autocast. Of our kernels it knows
nothing: without a mark, code of one table would be taken for that of the other.
"""

from __future__ import annotations

import threading
from hashlib import sha256

import torch

from accelcore.precision.table import O1

__all__ = ["mark", "unmark"]

_MARK = f"accelcore O1 {sha256(repr(sorted((name, it.value) for name, it in O1.items())).encode()).hexdigest()}"

_lock = threading.Lock()
_held = 0


def mark() -> None:
    """From now on what is compiled is of O1; where other threads compile meanwhile, that too."""
    global _held
    with _lock:
        _held += 1
        if _held == 1:
            torch.compiler.config.cache_key_tag += _MARK


def unmark() -> None:
    """Take one mark off; with the last, torch's setting is as it was."""
    global _held
    with _lock:
        _held -= 1
        if not _held:
            torch.compiler.config.cache_key_tag = torch.compiler.config.cache_key_tag.removesuffix(_MARK)

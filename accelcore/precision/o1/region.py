"""Regions of autocast: where table O1 or torch's table applies, also when a checkpointed part is recomputed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from hashlib import sha256
from types import TracebackType

import torch
from torch import Tensor

from accelcore.precision.o1.table import O1
from accelcore.torch_internals import in_backward, is_fake_mode_active

__all__ = [
    "Region",
    "clear_cast_cache",
    "in_low_precision",
    "is_o1_active",
    "is_torch_table_active",
]


class _State(threading.local):
    """Regions that this thread is in, and the weights cast in them."""

    def __init__(self) -> None:
        self.depth = 0
        self.torch_depth = 0
        self.casts: dict[tuple[int, torch.dtype], tuple[Tensor, int, Tensor]] = {}


_state = _State()
_mark = f"accelcore O1 {sha256(repr(sorted((name, it.value) for name, it in O1.items())).encode()).hexdigest()}"
_lock = threading.Lock()
_threads_in_o1 = 0


def _mark_compiled_code(change: int) -> None:
    """Mark code that is compiled while a thread is in O1.

    torch keeps compiled code on disk, by its source and the state of autocast. It does not know about O1's kernels:
    without a mark, it would use code of one table for the other.
    """
    global _threads_in_o1
    with _lock:
        _threads_in_o1 += change
        tag = torch.compiler.config.cache_key_tag.removesuffix(_mark)
        torch.compiler.config.cache_key_tag = tag + _mark * (_threads_in_o1 > 0)


class Region:
    """Context of autocast by table O1, or by torch's table for a device. It can be entered again after it was left.

    Whether torch's cache of casts is on tells the tables apart: on by torch's table, off by O1. torch restores this
    part of autocast's state when a checkpointed part of a model is recomputed, and compiled code guards on it.
    `prepare` installs kernels on entering.
    """

    def __init__(self, device_type: str, dtype: torch.dtype, table: str, prepare: Callable[[], None]) -> None:
        self._is_o1 = table == "O1"
        self._autocast = torch.autocast(device_type, dtype, cache_enabled=not self._is_o1)
        self._prepare = prepare

    def __enter__(self) -> None:
        self._prepare()
        self._autocast.__enter__()  # type: ignore[no-untyped-call]
        if not self._is_o1:
            _state.torch_depth += 1
            return
        if not _state.depth:
            _mark_compiled_code(+1)
        _state.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_o1:
            _state.torch_depth -= 1
        else:
            _state.depth -= 1
            if not _state.depth:
                _mark_compiled_code(-1)
                _state.casts.clear()
        self._autocast.__exit__(kind, error, traceback)


def is_torch_table_active() -> bool:
    """Return whether autocast follows torch's table now, in a `Region` of this thread."""
    return _state.torch_depth > 0 and torch.is_autocast_cache_enabled()


def is_o1_active() -> bool:
    """Return whether autocast follows table O1 now.

    It does in a `Region` of this thread, except under an inner autocast that has torch's cache. It also does where a
    backward pass recomputes a checkpointed part of such a region, maybe in a thread of the autograd engine. Compilers
    trace without the cache, too; that is a different case.
    """
    return not torch.is_autocast_cache_enabled() and (_state.depth > 0 or (in_backward() and not is_fake_mode_active()))


def in_low_precision(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor.to(dtype)`. A weight is cast once for all regions of this thread, as by torch's autocast."""
    if tensor.dtype is dtype:
        return tensor
    is_kept = _state.depth and tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled()
    if not is_kept or is_fake_mode_active():
        return tensor.to(dtype)
    # The weight is kept with its cast, so that no other tensor can get its id.
    kept = _state.casts.get((id(tensor), dtype))
    if kept is None or kept[1] != tensor._version:  # or written to, for example by load_state_dict
        kept = _state.casts[id(tensor), dtype] = (tensor, tensor._version, tensor.to(dtype))
    return kept[2]


def clear_cast_cache() -> None:
    """Cast weights again from now on, in regions that this thread stays in. Needed after an optimizer's update."""
    _state.casts.clear()

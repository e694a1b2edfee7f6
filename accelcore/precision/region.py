"""Where a table holds: a region of autocast, and what is computed anew for its backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

import torch
from torch import Tensor

from accelcore.precision.compiled import mark, unmark

__all__ = [
    "Region",
    "TorchsRegion",
    "forget_casts",
    "holds",
    "in_low_precision",
    "is_computed_anew",
    "torchs_holds",
]

_FAKE = torch._C._TorchDispatchModeKey.FAKE


class _State(threading.local):
    """This thread's: how many regions it is in, and what they have cast."""

    def __init__(self) -> None:
        self.depth = 0
        self.torchs_depth = 0
        self.casts: dict[tuple[int, torch.dtype], tuple[Tensor, int, Tensor]] = {}


_state = _State()


class Region:
    """Autocast by table O1. It can be entered again when it was left.

    torch's own cache of casts is off inside. That is the part of autocast's state by which O1 is known again: it is
    restored where a checkpointed part of a model is computed anew, and guarded on by compiled code.

    Args:
        device_type: torch's name of the device.
        dtype: of low precision.
        prepare: called on entering: sees to it that O1's kernels are in place.
    """

    def __init__(self, device_type: str, dtype: torch.dtype, prepare: Callable[[], None]) -> None:
        self._autocast = torch.autocast(device_type, dtype, cache_enabled=False)
        self._prepare = prepare

    def __enter__(self) -> None:
        self._prepare()
        self._autocast.__enter__()  # type: ignore[no-untyped-call]
        if not _state.depth:
            mark()
        _state.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _state.depth -= 1
        if not _state.depth:
            unmark()
            _state.casts.clear()
        self._autocast.__exit__(kind, error, traceback)


class TorchsRegion:
    """Autocast by torch's table for a device. It can be entered again when it was left.

    With torch's cache of casts, by which it is told from O1 inside a region of that one.

    Args:
        device_type: torch's name of the device.
        dtype: of low precision.
        prepare: called on entering: sees to it that what is refused on every device has its kernels.

    Attributes:
        dtype: as given.
    """

    def __init__(self, device_type: str, dtype: torch.dtype, prepare: Callable[[], None]) -> None:
        self.dtype = dtype
        self._autocast = torch.autocast(device_type, dtype, cache_enabled=True)
        self._prepare = prepare

    def __enter__(self) -> None:
        self._prepare()
        self._autocast.__enter__()  # type: ignore[no-untyped-call]
        _state.torchs_depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _state.torchs_depth -= 1
        self._autocast.__exit__(kind, error, traceback)


def torchs_holds() -> bool:
    """Whether an operator that autocast intercepts now is in a region of ours by torch's table."""
    return _state.torchs_depth > 0 and torch.is_autocast_cache_enabled()


def is_computed_anew() -> bool:
    """Whether this is a backward pass, in which a checkpointed part of a forward pass is computed anew."""
    return torch._C._current_graph_task_id() != -1


def holds() -> bool:
    """Whether an operator that autocast intercepts now goes by table O1.

    It does in a region of this thread, but for an autocast within it that has torch's cache; and in a backward pass
    where a checkpointed part of a region is computed anew, maybe by a thread of the autograd engine, under an autocast
    of torch's without its cache. Compilers trace without the cache, too, and are no such case.
    """
    return not torch.is_autocast_cache_enabled() and (
        _state.depth > 0 or (is_computed_anew() and torch._C._get_dispatch_mode(_FAKE) is None)
    )


def in_low_precision(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`; a weight is cast once for all regions that this thread is in, as by torch's autocast."""
    if tensor.dtype is dtype:
        return tensor
    if not (_state.depth and tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled()):
        return tensor.to(dtype)
    if torch._C._get_dispatch_mode(_FAKE) is not None:
        return tensor.to(dtype)
    # The weight is kept beside its cast, so that no other can come by its id.
    kept = _state.casts.get((id(tensor), dtype))
    if kept is None or kept[1] != tensor._version:  # or it was written to, by load_state_dict for one
        kept = _state.casts[id(tensor), dtype] = (tensor, tensor._version, tensor.to(dtype))
    return kept[2]


def forget_casts() -> None:
    """Cast weights anew from now on, in regions that this thread stays in: an optimizer has updated them."""
    _state.casts.clear()

"""Kernels of torch's that a backend replaces by better ones, until `accelcore.precision.reset()`."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

__all__ = ["Kernel", "Maker", "put_back", "replace"]

Kernel = Callable[..., Any]
Maker = Callable[[Kernel], Kernel]

_libraries: dict[str, torch.library.Library] = {}
_lock = threading.Lock()


def replace(name: str, makers: Mapping[OpOverload, Maker], dispatch_key: str) -> None:
    """Put kernels in place of torch's own, below autograd and autocast; does nothing where that was done.

    They compute what torch's do, faster: whoever calls the operators in this process gets them, compiled code too.

    Args:
        name: of these kernels together.
        makers: for each operator, what makes its kernel out of torch's own, which has the operator's signature.
        dispatch_key: of the device, such as `"CPU"`.
    """
    if name in _libraries:
        return
    with _lock:
        if name in _libraries:  # by another thread, meanwhile
            return
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            # torch says so of a kernel that is replaced; it is back when ours is taken out.
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            for operator, make in makers.items():
                kernel = make(_torchs(operator, dispatch_key))
                library.impl(operator, kernel, dispatch_key)  # type: ignore[no-untyped-call]
        _libraries[name] = library


def put_back() -> None:
    """Take all such kernels out again; torch's own are back."""
    with _lock:
        while _libraries:
            _libraries.popitem()[1]._destroy()  # type: ignore[no-untyped-call]


def _torchs(operator: OpOverload, dispatch_key: str) -> Kernel:
    kernel = torch.library.get_kernel(operator, dispatch_key)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))

    def call(*arguments: Any, **options: Any) -> Any:
        return kernel.call_boxed(keys, *arguments, **options)

    return call

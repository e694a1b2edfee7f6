"""Kernels that draw the same numbers on every device: put in the place of a device's own, and taken out again."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch._ops import OpOverload

from accelcore.errors import UnsupportedError
from accelcore.randomness.chances import draws, name_of, of_a_device
from accelcore.randomness.composed import COMPOSED
from accelcore.randomness.host import drawn

__all__ = ["draw_alike", "draw_apart", "drawn_alike"]

Kernel = Callable[..., Any]


class _Replaced:
    """The kernels that draw on a kind of device, replaced from when this is made until they are put back."""

    def __init__(self, device_type: str) -> None:
        device = torch._C._dispatch_key_for_device(device_type)
        keys = (device, f"Autograd{device}")
        kernels: dict[tuple[OpOverload, str], Kernel] = {
            (operator, key): _torchs_composition(operator) or partial(_refuse, operator)
            for key in keys
            for operator in of_a_device(key)
        }
        kernels |= {(operator, key): compose for operator, compose in COMPOSED.items() for key in keys}
        kernels |= {(operator, device): kernel for operator, kernel in drawn().items()}
        self._kernels = {place: _where_it_draws(*place, kernel, device_type) for place, kernel in kernels.items()}
        self._libraries: dict[str, torch.library.Library] = {}
        with warnings.catch_warnings():
            # torch says so of a kernel that is replaced; it is back when ours is taken out.
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            for (operator, key), kernel in self._kernels.items():
                library = self._library(operator.namespace)
                library.impl(operator, kernel, key, with_keyset=True)  # type: ignore[no-untyped-call]
        self._forget()

    def put_back(self) -> None:
        for library in self._libraries.values():
            library._destroy()  # type: ignore[no-untyped-call]
        self._forget()

    def _library(self, namespace: str) -> torch.library.Library:
        if namespace not in self._libraries:
            self._libraries[namespace] = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        return self._libraries[namespace]

    def _forget(self) -> None:
        """Torch's dispatcher in Python, which compilers trace with, remembers at which keys there was a kernel."""
        for operator, key in self._kernels:
            operator._uncache_dispatch(getattr(torch._C.DispatchKey, key))


_replaced: dict[str, _Replaced] = {}
_eagerly: Any = None  # torch's stance to what is compiled
_lock = threading.Lock()


def draw_alike(device_type: str) -> None:
    """From now on, draw what is drawn on a kind of device, and on the host, from torch's generator of the host.

    Forks, as of a data loader's workers, go on drawing as torch does. What torch.compile has compiled, or will, runs
    eagerly: compilers draw in code of their own.
    """
    global _eagerly
    with _lock:
        for kind in ("cpu", device_type):
            if kind not in _replaced:
                _replaced[kind] = _Replaced(kind)
        if _eagerly is None:
            _eagerly = torch.compiler.set_stance("force_eager")


def draw_apart() -> None:
    """Let each device draw its own numbers again."""
    global _eagerly
    with _lock:
        while _replaced:
            _replaced.popitem()[1].put_back()
        if _eagerly is not None:
            _eagerly.__exit__(None, None, None)
            _eagerly = None


def drawn_alike() -> bool:
    """Whether numbers are drawn alike."""
    return bool(_replaced)


def _where_it_draws(operator: OpOverload, key: str, alike: Kernel, device_type: str) -> Kernel:
    """A kernel that draws alike, and where nothing is drawn does what was done at this key before."""
    has_own = torch._C._dispatch_has_computed_kernel_for_dispatch_key(name_of(operator), key)
    own = torch.library.get_kernel(operator, key).call_boxed if has_own else None
    capturing = getattr(torch.get_device_module(device_type), "is_current_stream_capturing", bool)
    process = os.getpid()

    def kernel(keys: torch.DispatchKeySet, *arguments: Any, **options: Any) -> Any:
        if own is not None and (os.getpid() != process or not draws(operator, arguments, options)):
            return own(keys, *arguments, **options)
        if capturing():
            raise UnsupportedError(
                f"{name_of(operator)} would draw random numbers inside a graph",
                why='runtime.seed(..., same="everywhere") has them drawn on the host, once for all launches',
                remedy="leave the graph out, or seed without same",
            )
        return alike(*arguments, **options)

    return kernel


def _torchs_composition(operator: OpOverload) -> Kernel | None:
    """What torch makes an operator of, if it does: the CPU has that where it has no kernel of its own."""
    name = name_of(operator)
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
        return None
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU"):
        return None
    composition = torch.library.get_kernel(operator, "CPU").call_boxed
    return partial(composition, torch._C.DispatchKeySet(torch._C.DispatchKey.CPU))


def _refuse(operator: OpOverload, *arguments: Any, **options: Any) -> NoReturn:
    raise UnsupportedError(
        f"{name_of(operator)} draws random numbers of its own",
        why='runtime.seed(..., same="everywhere") was called, and other devices do not have these',
        remedy="use what every device has in its place, such as torch.dropout, or seed without same",
    )

"""Kernels that replace torch's own in its dispatcher, until they are removed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from accelcore.torch_internals import (
    OpOverload,
    dispatch_keyset,
    forget_python_dispatch,
    never_compile,
    register_kernel,
    remove_library,
    replaceable_kernel,
)

Kernel = Callable[..., Any]
Placed = tuple[tuple[OpOverload, str], Kernel]  # an operator, a dispatch key, and the kernel for both


class Overrides:
    """Sets of kernels in torch's dispatcher, each installed once under a name. They hold in the whole process.

    A kernel calls the one that it replaces, which must not be removed before it. `beneath`: sets that these stay above,
    whenever those are installed.
    """

    def __init__(self, beneath: Overrides | None = None) -> None:
        self._above: Overrides | None = None
        if beneath is not None:
            beneath._above = self
        self._sets: dict[str, tuple[Callable[[], Iterator[Placed]], bool]] = {}
        self._removals: dict[str, ExitStack] = {}  # by the names of the sets
        self.kernels: dict[tuple[OpOverload, str], Kernel] = {}  # the one that was installed last at each place
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._removals)

    def install(self, name: str, make: Callable[[], Iterator[Placed]], *, with_keyset: bool = True) -> None:
        """Install the kernels that `make` yields, all or none; do nothing if a set of that name is installed.

        `with_keyset`: whether the kernels take the set of dispatch keys as their first argument.
        """
        if name in self._removals:
            return
        with self._without_above(), self._lock, warnings.catch_warnings(), ExitStack() as removal:
            if name in self._removals:  # another thread has installed it meanwhile
                return
            # torch warns of a kernel that is replaced; it is back after `remove`.
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            kernels, libraries = dict(make()), dict[str, Any]()
            for operator, key in kernels:
                removal.callback(forget_python_dispatch, operator, key)  # called after the libraries are removed
            for (operator, key), kernel in kernels.items():
                never_compile(kernel)
                if operator.namespace not in libraries:
                    libraries[operator.namespace] = torch.library.Library(operator.namespace, "IMPL")
                    removal.callback(remove_library, libraries[operator.namespace])
                # Another set may be installed at the same key.
                register_kernel(libraries[operator.namespace], operator, kernel, key, with_keyset)
            for operator, key in kernels:
                forget_python_dispatch(operator, key)
            self._removals[name] = removal.pop_all()
            self._sets[name] = make, with_keyset
            self.kernels |= kernels

    def remove(self) -> None:
        """Remove all sets, so that torch's own kernels are back."""
        with self._without_above(), self._lock:
            self.kernels.clear()
            self._sets.clear()
            while self._removals:
                self._removals.popitem()[1].close()

    @contextmanager
    def _without_above(self) -> Iterator[None]:
        above = self._above
        sets = dict(above._sets) if above else {}
        if above and sets:
            above.remove()
        try:
            yield
        finally:
            for name, (make, with_keyset) in sets.items():
                assert above is not None, "it had the sets"
                above.install(name, make, with_keyset=with_keyset)


overrides = Overrides()
"""Those for precision, which `accelcore.precision.reset()` removes."""


def replace_kernels(name: str, kernels: Mapping[OpOverload, Kernel], dispatch_key: str) -> None:
    """Replace torch's kernels of a device, below autograd and autocast; do nothing if they are replaced already.

    The new kernels compute the same, faster. Everything in this process that calls the operators gets them, compiled
    code included. A kernel gets torch's own, and then the arguments of its operator. Only with `GET_KERNEL`.
    """

    def make() -> Iterator[Placed]:
        for operator, kernel in kernels.items():
            yield (operator, dispatch_key), partial(kernel, torch_kernel(operator, dispatch_key))

    overrides.install(name, make, with_keyset=False)


def torch_kernel(operator: OpOverload, dispatch_key: str) -> Kernel:
    """Return the kernel at a dispatch key now, to be called directly, also after an override; see `GET_KERNEL`."""
    return partial(replaceable_kernel(operator, dispatch_key), dispatch_keyset(dispatch_key))

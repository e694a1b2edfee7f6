"""Operators that a device hands to the host."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from accelcore.torch_internals import device_dispatch_key

_EVERYWHERE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


class HostKernels(TorchDispatchMode):
    """Collects the names of operators that got tensors of a device and have no kernel for it.

    torch's fallback then copies the tensors to the CPU, if the vendor registered it.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self._kind = device.type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._kind != "cpu" and not _has_kernel(func.name(), self._kind):
            leaves = pytree.tree_leaves((args, kwargs))
            if any(isinstance(leaf, Tensor) and leaf.device.type == self._kind for leaf in leaves):
                self.names.add(func.name())
        return func(*args, **kwargs)


@cache
def _has_kernel(name: str, kind: str) -> bool:
    own = device_dispatch_key(kind)
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in (own, *_EVERYWHERE))

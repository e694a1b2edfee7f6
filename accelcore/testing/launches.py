"""How many operators a device is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Launches"]


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of the operators that compute on a device; what the host computes beside it is not counted."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self._kind = device.type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, Tensor) and leaf.device.type == self._kind for leaf in leaves):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))

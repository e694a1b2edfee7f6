"""Record fallbacks to the CPU and random draws inside an operator."""

from __future__ import annotations

from typing import Any

import torch
from accelcore_npu.fallback import has_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records fallbacks and random draws.

    Attributes:
        fallbacks: operators that got NPU tensors and have no NPU kernel.
        draws: whether an operator drew random numbers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fallbacks: set[str] = set()
        self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record one operator and run it."""
        kwargs = kwargs or {}
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        if not has_kernel(func.name()):
            leaves = tree_leaves((args, kwargs))
            if any(isinstance(leaf, torch.Tensor) and leaf.device.type == "npu" for leaf in leaves):
                self.fallbacks.add(func.name())
        return func(*args, **kwargs)

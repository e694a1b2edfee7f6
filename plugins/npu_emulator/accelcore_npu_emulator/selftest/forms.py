"""Run one operator in one form, on the CPU or the NPU, and watch for fallbacks and random draws."""

from __future__ import annotations

from typing import Any

import torch
from accelcore_npu.fallback import has_kernel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# torch wants the indices of this operator on the host.
_HOST_INDICES = ("tensor_split",)


def available(operator: Any, dtype: torch.dtype) -> list[str]:
    """Return the forms of an operator in a dtype, by torch's samples."""
    forms = {
        "forward": True,
        "backward": operator.supports_autograd and dtype in operator.supported_backward_dtypes("cpu"),
        "in place": operator.inplace_variant is not None,
        "out=": operator.supports_out,
    }
    return [form for form, there in forms.items() if there]


def evaluate(operator: Any, sample: Any, form: str, device: str) -> list[Tensor]:
    """Copy a sample's arguments to a device, run the operator and return its tensors.

    In place and with `out=`, return the written tensors and check that the operator returned the same ones.
    """
    arguments, options = _placed(
        ((sample.input, *sample.args), sample.kwargs),
        device,
        keep_indices=operator.name in _HOST_INDICES,
        keep_graph=form == "backward",
    )
    if form == "backward":
        return _gradients(operator.op(*arguments, **options), (arguments, options))
    with torch.no_grad():
        if form == "in place":
            written = arguments[0]
            returned = operator.inplace_variant(*arguments, **options)
        elif form == "out=":
            written = tree_map(_unwritten, operator.op(*arguments, **options))
            returned = operator.op(*arguments, **options, out=written)
        else:
            return _tensors(operator.op(*arguments, **options))
    for one, other in zip(_tensors(returned), _tensors(written), strict=True):
        assert one is other or one.data_ptr() == other.data_ptr(), f"{form}: what is returned is another tensor"
    return _tensors(written)


def _unwritten(value: Any) -> Any:
    return torch.empty_like(value) if isinstance(value, Tensor) else value


def _placed(value: Any, device: str, *, keep_indices: bool, keep_graph: bool) -> Any:
    """The same arguments on a device, each tensor with its strides, its offset and the memory around it."""

    def move(item: Any) -> Any:
        if isinstance(item, torch.device) or (isinstance(item, str) and item == "cpu"):
            return torch.device(device)
        if not isinstance(item, Tensor):
            return item
        target = "cpu" if keep_indices and not item.is_floating_point() else device
        if item.layout != torch.strided or item.is_conj() or item.is_neg():
            moved = item.detach().to(target, copy=True)
        else:
            count = item.untyped_storage().nbytes() // item.element_size()
            memory = item.detach().as_strided((count,), (1,), 0).to(target, copy=True)
            moved = memory.as_strided(item.shape, item.stride(), item.storage_offset())
        return moved.requires_grad_(item.requires_grad and keep_graph)

    return tree_map(move, value)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _gradients(result: Any, arguments: Any) -> list[Tensor]:
    outputs = [tensor.abs().sum() for tensor in _tensors(result) if tensor.requires_grad]
    inputs = [tensor for tensor in _tensors(arguments) if tensor.requires_grad]
    if not outputs or not inputs:
        return []
    found = torch.autograd.grad(outputs, inputs, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


class Watch(TorchDispatchMode):
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

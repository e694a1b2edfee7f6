"""How much a forward pass multiplies: read off the graph that autograd recorded of it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from accelcore.roles.precision import Work

__all__ = ["work_of"]

_PRODUCTS = ("AddmmBackward0", "MmBackward0", "BmmBackward0", "BaddbmmBackward0")
_ATTENTION = "ScaledDotProduct"
_CONVOLUTION = "ConvolutionBackward0"
_CAST = "ToCopyBackward0"
_HIDING = ("Compiled", "Checkpoint", "Rnn")  # nodes that multiply, and do not say how much


def work_of(loss: Tensor) -> Work | None:
    """The products and casts behind a loss, or None where the graph does not show them, as that of a compiled model.

    Looks at shapes alone: it computes nothing, and no tensor that is kept for backward is fetched.
    """
    products = operations = casts = 0
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [function for function, _ in node.next_functions]
        name = node.name()
        if any(word in name for word in _HIDING):
            return None
        casts += name == _CAST
        found = _operations(name, node)
        products += found > 0
        operations += found
    return Work(products, operations, casts)


def _operations(name: str, node: Any) -> int:
    """Multiplications and additions of a node; 0 of one that is no product."""
    if not (name in _PRODUCTS or name == _CONVOLUTION or name.startswith(_ATTENTION)):
        return 0
    elements: int = prod(node._input_metadata[0].shape)
    inputs: list[Sequence[int] | None] = [
        function and function._input_metadata[number].shape for function, number in node.next_functions
    ]
    if name.startswith(_ATTENTION):
        keys = inputs[1] or inputs[0]
        return 4 * elements * keys[-2] if keys else 0
    if name == _CONVOLUTION:
        weight = inputs[1]
        return 2 * elements * prod(weight[1:]) if weight else 0
    left, right = inputs[-2:]
    shared: int = left[-1] if left else right[-2] if right else 0
    return 2 * elements * shared

"""Operators that are computed in another way: their gradients, one result, between other calls, one tensor twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from accelcore.testing.support.layouts import drawn_weights, tensors
from accelcore.testing.support.values import others_of

_REPORTED = ("Error", "CppFunction")  # torch's nodes that raise or warn if a backward pass is differentiated


class Gradient:
    """The gradient of an operator, as an operator: its own gradients are the second derivatives."""

    inplace_variant, supports_out = None, False

    def __init__(self, info: Any) -> None:
        self._info = info

    def op(self, *given: Any, **options: Any) -> list[Tensor]:
        """Return the gradients of a weighted sum of the operator's results and of half of their squares.

        Because of the squares, the gradient that the operator is given depends on its arguments, too.
        """
        roots = [each for each in tensors(self._info.op(*given, **options)) if each.requires_grad]
        leaves = [leaf for leaf in tensors((given, options)) if leaf.requires_grad]
        if not (leaves and roots):
            return []
        weights = [drawn_weights(root.shape, root.dtype).to(root.device, copy=True).requires_grad_() for root in roots]
        given_back = [weight * (1 + root) for weight, root in zip(weights, roots, strict=True)]
        found = torch.autograd.grad(roots, leaves, given_back, create_graph=True, allow_unused=True)
        gradients = [each for each in found if each is not None]
        if any(type(each.grad_fn).__name__ in _REPORTED for each in gradients):
            raise NotImplementedError("torch reports that its backward pass has no derivative")
        return gradients


class OneResult:
    """One of an operator's results: its backward pass is given no gradient of the others."""

    inplace_variant, supports_out = None, False

    def __init__(self, info: Any, number: int) -> None:
        self._info, self._number = info, number

    def op(self, *given: Any, **options: Any) -> Tensor:
        """Return the result."""
        return tensors(self._info.op(*given, **options))[self._number]


class Between:
    """An operator between calls of it with arguments of the same shapes and other values."""

    inplace_variant, supports_out = None, False

    def __init__(self, info: Any) -> None:
        self._info = info

    def op(self, *given: Any, **options: Any) -> Any:
        """Return the operator's result, which neither the call before it nor the one after it may change.

        In float64, in which the oracle computes, there is one call.
        """
        if any(tensor.dtype == torch.float64 for tensor in tensors((given, options))):
            return self._info.op(*given, **options)
        others = others_of((given, options))
        with _holding(tensors((given, options)), tensors(others)):
            self._try(given, options)
        result = self._info.op(*given, **options)
        self._try(*others)
        return result

    def _try(self, given: Any, options: Any) -> None:
        with suppress(Exception):  # values that do not fit
            self._info.op(*given, **options)


@contextmanager
def _holding(owned: list[Tensor], others: list[Tensor]) -> Iterator[None]:
    """Let tensors hold other values, written to their memory as many scripts do: by `.data`, which nothing counts."""
    pairs = [(one, other) for one, other in zip(owned, others, strict=True) if one.is_floating_point()]
    kept = [one.detach().clone() for one, _ in pairs]
    for one, other in pairs:
        one.data.copy_(other)
    try:
        yield
    finally:
        for (one, _), values in zip(pairs, kept, strict=True):
            one.data.copy_(values)


class Twice:
    """A binary operator that is given one tensor as both operands."""

    def __init__(self, info: Any) -> None:
        self._info, self.supports_out = info, info.supports_out
        self.inplace_variant = None if info.inplace_variant is None else self._in_place

    def op(self, operand: Tensor, *given: Any, **options: Any) -> Any:
        """Return the operator's result."""
        return self._info.op(operand, operand, *given, **options)

    def _in_place(self, operand: Tensor, *given: Any, **options: Any) -> Any:
        return self._info.inplace_variant(operand, operand, *given, **options)

"""Operators of synchronised batch normalisation, for which torch has no CPU kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


def _channels_last(input: Tensor) -> Tensor:
    """Return values by channel: (everything else, channels), in float32."""
    return input.float().transpose(0, 1).flatten(1).T


def _like(values: Tensor, input: Tensor) -> Tensor:
    """Return a value for each channel, shaped to broadcast over `input`."""
    return values.reshape(1, -1, *[1] * (input.dim() - 2))


def _stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(_channels_last(input), 0, correction=0)
    return mean, torch.rsqrt(variance + eps)


def _reduce(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    values = _channels_last(input)
    return values.sum(0), values.square().sum(0)


def _update(running: Tensor | None, value: Tensor, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


def _with_counts(mean: Tensor, invstd: Tensor, eps: float, counts: Tensor) -> tuple[Tensor, Tensor]:
    weight = (counts / counts.sum()).reshape(-1, 1)
    total = (mean * weight).sum(0)
    return total, ((invstd.pow(-2) - eps + (mean - total).square()) * weight).sum(0)


def _of_sums(sums: Tensor, squares: Tensor, eps: float, counts: Tensor) -> tuple[Tensor, Tensor]:
    count = counts.sum()
    total = sums.sum(0) / count
    return total, squares.sum(0) / count - total.square()


def _gathered(combine: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the kernel that combines the statistics of all ranks to a mean and a variance."""

    def kernel(
        input: Tensor,
        mean: Tensor,
        invstd: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        counts: Tensor,
    ) -> tuple[Tensor, Tensor]:
        count = counts.sum()
        total, variance = combine(mean, invstd, eps, counts)
        _update(running_mean, total, momentum)
        _update(running_var, variance * count / (count - 1), momentum)
        return total, torch.rsqrt(variance + eps)

    return kernel


def _elemt(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    out = (input.float() - _like(mean, input)) * _like(invstd, input)
    if weight is not None:
        out = out * _like(weight.float(), input)
    if bias is not None:
        out = out + _like(bias.float(), input)
    return out.to(input.dtype)


def _backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    upstream = _channels_last(grad_out)
    sum_dy = upstream.sum(0)
    sum_dy_xmu = (upstream * (_channels_last(input) - mean)).sum(0)
    dtype = mean.dtype if weight is None else weight.dtype
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(dtype), sum_dy.to(dtype)


def _backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    total = count.sum()
    centred = input.float() - _like(mean, input)
    projection = centred * _like(invstd.square() * sum_dy_xmu / total, input)
    grad = (grad_out.float() - _like(sum_dy / total, input) - projection) * _like(invstd, input)
    if weight is not None:
        grad = grad * _like(weight.float(), input)
    return grad.to(input.dtype)


OPERATORS: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": _stats,
    "batch_norm_reduce": _reduce,
    "batch_norm_gather_stats_with_counts": _gathered(_with_counts),
    "batch_norm_gather_stats_update": _gathered(_of_sums),
    "batch_norm_elemt": _elemt,
    "batch_norm_backward_reduce": _backward_reduce,
    "batch_norm_backward_elemt": _backward_elemt,
}

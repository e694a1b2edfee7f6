"""torch's fused kernels called directly: what torch's classes do around them takes longer than a small update itself.

Each class is torch's own, with its checks, options and state, and a shorter way to the same kernel. One thing differs:
SGD's momentum starts as zeros. torch takes the first update of all parameters for the first of each, so that one whose
first gradient comes late is a TypeError, and a first step that is skipped leaves momentum that was never written. Where
dampening is 0 the updates are the same. And a gradient that lies in memory otherwise than its parameter is laid out
anew: the kernels go through the memory of both side by side.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from accelcore.errors import TrainingError
from accelcore.optim.groups import merged
from accelcore.optim.stepping import Updating

__all__ = ["FUSED"]

Entries = list[dict[str, Any]]


class _Fused(Updating, torch.optim.Optimizer):
    """Collects what the kernel needs. Subclasses put this before the torch class whose options they have."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, fused=True, **options)  # type: ignore[call-arg]  # torch's class comes next
        self._ones: dict[torch.device, Tensor] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._ones = {}

    def update(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        for group in merged(self.param_groups):
            for tensors in _alike([tensor for tensor in group["params"] if tensor.grad is not None]):
                gradients: list[Any] = [tensor.grad for tensor in tensors]
                if True in [gradient.is_sparse for gradient in gradients]:
                    raise TrainingError(
                        "a gradient is sparse, and the fused kernel would take its memory for a dense one",
                        remedy='make the optimizer by route="loop", or the embedding with sparse=False',
                    )
                gradients = [_as_laid(tensor, gradient) for tensor, gradient in zip(tensors, gradients, strict=True)]
                entries = [self.state[tensor] or self._begin(tensor, group) for tensor in tensors]
                self._launch(group, tensors, gradients, entries, {"found_inf": found_inf, "grad_scale": grad_scale})

    def _begin(self, tensor: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Make the state of a tensor that has its first gradient."""
        raise NotImplementedError

    def _launch(
        self, group: dict[str, Any], tensors: list[Tensor], gradients: list[Any], entries: Entries, scaling: Any
    ) -> None:
        raise NotImplementedError

    def _counted(self, entries: Entries, found_inf: Tensor | None) -> list[Tensor]:
        """The numbers of steps, this one included where it is not skipped."""
        steps: list[Tensor] = [entry["step"] for entry in entries]
        device = steps[0].device
        if device not in self._ones:  # a number would be made a tensor again and again
            self._ones[device] = torch.ones((), device=device)
        one = self._ones[device] if found_inf is None else 1 - found_inf
        if len(steps) == 1:  # a list of one is slower than the one
            steps[0].add_(one)
        else:
            torch._foreach_add_(steps, [one] * len(steps))
        return steps


class _Adam(_Fused):
    def _begin(self, tensor: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        entry: dict[str, Any] = self.state[tensor]
        entry["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        for key in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
            entry[key] = torch.zeros_like(tensor)
        return entry

    def _launch(
        self, group: dict[str, Any], tensors: list[Tensor], gradients: list[Any], entries: Entries, scaling: Any
    ) -> None:
        beta1, beta2 = group["betas"]
        (torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_)(
            tensors,
            gradients,
            [entry["exp_avg"] for entry in entries],
            [entry["exp_avg_sq"] for entry in entries],
            [entry["max_exp_avg_sq"] for entry in entries] if group["amsgrad"] else [],
            self._counted(entries, scaling["found_inf"]),
            lr=_there(group["lr"], tensors[0]),
            beta1=_number(beta1),
            beta2=_number(beta2),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            **scaling,
        )


class _Adagrad(_Fused):
    def _begin(self, tensor: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        entry: dict[str, Any] = self.state[tensor]
        entry["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        entry["sum"] = torch.full_like(tensor, group["initial_accumulator_value"])
        return entry

    def _launch(
        self, group: dict[str, Any], tensors: list[Tensor], gradients: list[Any], entries: Entries, scaling: Any
    ) -> None:
        torch._fused_adagrad_(
            tensors,
            gradients,
            [entry["sum"] for entry in entries],
            self._counted(entries, scaling["found_inf"]),
            lr=_there(group["lr"], tensors[0]),
            lr_decay=group["lr_decay"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            **scaling,
        )


class _SGD(_Fused):
    def _begin(self, tensor: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        entry: dict[str, Any] = self.state[tensor]
        if group["momentum"]:
            entry["momentum_buffer"] = torch.zeros_like(tensor)
        return entry

    def _launch(
        self, group: dict[str, Any], tensors: list[Tensor], gradients: list[Any], entries: Entries, scaling: Any
    ) -> None:
        torch._fused_sgd_(
            tensors,
            gradients,
            [entry["momentum_buffer"] for entry in entries] if group["momentum"] else [],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=_there(group["lr"], tensors[0]),
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=False,
            **scaling,
        )


class FusedAdagrad(_Adagrad, torch.optim.Adagrad):
    """torch's Adagrad by its fused kernel."""


class FusedAdam(_Adam, torch.optim.Adam):
    """torch's Adam by its fused kernel."""


class FusedAdamW(_Adam, torch.optim.AdamW):
    """torch's AdamW by its fused kernel."""


class FusedSGD(_SGD, torch.optim.SGD):
    """torch's SGD by its fused kernel."""


FUSED: dict[str, type[torch.optim.Optimizer]] = {
    "adagrad": FusedAdagrad,
    "adam": FusedAdam,
    "adamw": FusedAdamW,
    "sgd": FusedSGD,
}
"""By the registry's name."""


def _alike(tensors: list[Tensor]) -> Iterable[list[Tensor]]:
    """Those of one device and dtype together."""
    if len(tensors) == 1:
        return (tensors,)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return alike.values()


def _as_laid(tensor: Tensor, gradient: Tensor) -> Tensor:
    """The gradient, in memory as the tensor is."""
    if gradient.stride() == tensor.stride():
        return gradient
    return torch.empty_like(tensor).copy_(gradient)


def _there(lr: float | Tensor, tensor: Tensor) -> Any:
    return lr.to(tensor.device, non_blocking=True) if isinstance(lr, Tensor) else lr


def _number(beta: float | Tensor) -> float:
    return beta.item() if isinstance(beta, Tensor) else beta

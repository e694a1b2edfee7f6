"""torch's fused kernels, and how each is given what it updates.

What torch's classes do around them takes longer than a small update itself. Options and state are those of torch's
class, under its keys. One thing differs: SGD's momentum starts as zeros. torch takes the first update of all parameters
for the first of each, so that one whose first gradient comes late is a TypeError, and a first step that is skipped
leaves momentum that was never written. Where dampening is 0 the updates are the same. And a gradient that lies in
memory otherwise than its parameter is laid out anew: the kernels go through the memory of both side by side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelcore.errors import TrainingError
from accelcore.optim.groups import merged

__all__ = ["AdagradKernel", "AdamKernel", "FusedKernel", "SGDKernel"]

Entry = dict[str, Any]


class FusedKernel(ABC):
    """One of torch's fused kernels, called for all parameters of an optimizer that has its options and state."""

    def __init__(self) -> None:
        self._ones: dict[torch.device, Tensor] = {}

    def update(self, optimizer: Optimizer, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        """Update what has a gradient, after dividing it by `grad_scale`; nothing where `found_inf` is 1.

        Raises:
            TrainingError: a gradient is sparse.
        """
        state, scaling = optimizer.state, {"found_inf": found_inf, "grad_scale": grad_scale}
        for group in merged(optimizer.param_groups):
            for tensors in _alike([tensor for tensor in group["params"] if tensor.grad is not None]):
                gradients: list[Any] = [tensor.grad for tensor in tensors]
                if True in [gradient.is_sparse for gradient in gradients]:
                    raise TrainingError(
                        "a gradient is sparse, and the fused kernel would take its memory for a dense one",
                        remedy='make the optimizer by route="loop", or the embedding with sparse=False',
                    )
                gradients = _as_laid(tensors, gradients)
                entries = []
                if self.keeps_state(group):
                    entries = [state[tensor] or self.begin(state[tensor], tensor, group) for tensor in tensors]
                self.launch(group, tensors, gradients, entries, scaling)

    def keeps_state(self, group: dict[str, Any]) -> bool:
        """Whether there is state of this group's tensors."""
        return True

    @abstractmethod
    def begin(self, entry: Entry, tensor: Tensor, group: dict[str, Any]) -> Entry:
        """Fill in the state of a tensor that has its first gradient."""

    @abstractmethod
    def launch(
        self, group: dict[str, Any], tensors: list[Tensor], gradients: list[Tensor], entries: list[Entry], scaling: Any
    ) -> None:
        """Call the kernel for tensors of one device and dtype; `entries`: their state, where any is kept."""

    def counted(self, entries: list[Entry], found_inf: Tensor | None) -> list[Tensor]:
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


class AdamKernel(FusedKernel):
    """That of Adam and AdamW."""

    def begin(self, entry: Entry, tensor: Tensor, group: dict[str, Any]) -> Entry:
        entry["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        for key in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
            entry[key] = torch.zeros_like(tensor)
        return entry

    def launch(
        self, group: dict[str, Any], tensors: list[Tensor], gradients: list[Tensor], entries: list[Entry], scaling: Any
    ) -> None:
        beta1, beta2 = group["betas"]
        (torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_)(
            tensors,
            gradients,
            [entry["exp_avg"] for entry in entries],
            [entry["exp_avg_sq"] for entry in entries],
            [entry["max_exp_avg_sq"] for entry in entries] if group["amsgrad"] else [],
            self.counted(entries, scaling["found_inf"]),
            lr=_there(group["lr"], tensors[0]),
            beta1=_number(beta1),
            beta2=_number(beta2),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            **scaling,
        )


class AdagradKernel(FusedKernel):
    """That of Adagrad."""

    def begin(self, entry: Entry, tensor: Tensor, group: dict[str, Any]) -> Entry:
        entry["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        entry["sum"] = torch.full_like(tensor, group["initial_accumulator_value"])
        return entry

    def launch(
        self, group: dict[str, Any], tensors: list[Tensor], gradients: list[Tensor], entries: list[Entry], scaling: Any
    ) -> None:
        torch._fused_adagrad_(
            tensors,
            gradients,
            [entry["sum"] for entry in entries],
            self.counted(entries, scaling["found_inf"]),
            lr=_there(group["lr"], tensors[0]),
            lr_decay=group["lr_decay"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            **scaling,
        )


class SGDKernel(FusedKernel):
    """That of SGD."""

    def keeps_state(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"])

    def begin(self, entry: Entry, tensor: Tensor, group: dict[str, Any]) -> Entry:
        entry["momentum_buffer"] = torch.zeros_like(tensor)
        return entry

    def launch(
        self, group: dict[str, Any], tensors: list[Tensor], gradients: list[Tensor], entries: list[Entry], scaling: Any
    ) -> None:
        for entry, tensor in zip(entries, tensors, strict=bool(entries)):
            if entry["momentum_buffer"] is None:  # as it was saved where there was no momentum
                self.begin(entry, tensor, group)
        torch._fused_sgd_(
            tensors,
            gradients,
            [entry["momentum_buffer"] for entry in entries],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=_there(group["lr"], tensors[0]),
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=False,
            **scaling,
        )


def _alike(tensors: list[Tensor]) -> Iterable[list[Tensor]]:
    """Those of one device and dtype together."""
    if len(tensors) == 1:
        return (tensors,)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return alike.values()


def _as_laid(tensors: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """The gradients, each in memory as its tensor is."""
    if all(map(Tensor.is_contiguous, tensors)) and all(map(Tensor.is_contiguous, gradients)):
        return gradients
    return [
        gradient if gradient.stride() == tensor.stride() else torch.empty_like(tensor).copy_(gradient)
        for tensor, gradient in zip(tensors, gradients, strict=True)
    ]


def _there(lr: float | Tensor, tensor: Tensor) -> Any:
    return lr.to(tensor.device, non_blocking=True) if isinstance(lr, Tensor) else lr


def _number(beta: float | Tensor) -> float:
    return beta.item() if isinstance(beta, Tensor) else beta

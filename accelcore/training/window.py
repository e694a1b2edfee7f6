"""Windows: the micro-batches between two updates, and their weights."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from accelcore.devices import Roles
from accelcore.errors import TrainingError
from accelcore.precision.policy import LOW_PRECISION
from accelcore.util.containers import described, tensors
from accelcore.util.text import is_number

_WHOLE = re.compile(r"(?i)\b(u?int\d*|long|short|char|byte|bool)\b")
"""Dtypes of whole numbers. An error that names one is about classes or indices, which are not cast to a float."""


class Window:
    """Count and weigh the micro-batches of a window.

    A micro-batch's loss is a mean over examples. Backward multiplies its gradients by a *share*. At the end of the
    window all gradients are multiplied by a *correction*: 1 / (the sum of shares, averaged over ranks), so that the
    weights add up to 1. Without weights each share is `1 / accumulate`, and only a short window needs a correction.

    Weights are added up on the device, so that the host never waits for one. `divisor`: ranks add their gradients up,
    so backward divides by it, which costs nothing there. `tensors_only`: refuse a number as a weight, because a
    captured graph would keep its first value.
    """

    def __init__(self, accumulate: int, backend: Roles, *, divisor: int, tensors_only: bool) -> None:
        self.accumulate, self.divisor = accumulate, divisor
        self._device, self._job, self._tensors_only = backend.device, backend.collectives, tensors_only
        self.micro = self.steps = 0  # micro-batches of this window, and windows closed so far
        self._weighted: bool | None = None  # not known before the first backward pass
        self._unit: float | None = None
        self._total: Tensor | None = None  # one memory for all windows: captured steps add to it
        self._counted = -1  # the last weighted micro-batch
        self._whole_share = None if accumulate * divisor == 1 else 1 / (accumulate * divisor)

    @property
    def is_last(self) -> bool:
        """Whether the next micro-batch fills the window."""
        return self.micro == self.accumulate - 1

    def share(self, weight: float | Tensor | None) -> float | Tensor | None:
        """Return the factor of a micro-batch's gradients; None for 1."""
        if self._weighted not in (None, weight is not None):
            remedy = "call backward(loss, weight=...) with a weight for every micro-batch, or for none"
            raise TrainingError("some micro-batches of this window have a weight, and others do not", remedy=remedy)
        self._weighted = weight is not None
        if weight is None:
            return self._whole_share
        if self._counted == self.micro:
            raise TrainingError(
                "backward was called with a weight for a second loss of one micro-batch",
                remedy="add up the losses of a micro-batch first. If these are two micro-batches, call "
                "trainer.update() between them, and set accumulate= to the number of a window",
            )
        weight = self._checked(weight)
        if self._unit is None:  # shares near 1 leave the loss scale as it is
            unit = float(self._job.all_reduce(weight.clone(), "avg"))
            self._unit = unit if 0 < unit < math.inf else 1.0
        if self._total is None:
            self._total = torch.zeros((), device=self._device)
        share = weight / (self._unit * self.accumulate)
        self._total += share
        share = share if self.divisor == 1 else share / self.divisor
        self._counted = self.micro
        return share

    def correction(self, *, full: bool) -> float | Tensor | None:
        """Return the factor of a window's gradients, after they were averaged over ranks; None for 1."""
        if self._weighted:
            assert self._total is not None
            total = self._job.all_reduce(self._total.clone(), "avg")
            return torch.where(total > 0, total.reciprocal(), 0.0)
        return None if full else self.accumulate / self.micro

    def annotate(self, error: BaseException, batch: Any, model: nn.Module) -> None:
        """Add the step and the batch to an error of a micro-batch, where Python shows notes (3.11 or later)."""
        add_note = getattr(error, "add_note", None)  # the error keeps its class: a script may wait for OutOfMemoryError
        if add_note is not None and isinstance(error, Exception):
            number = f", micro-batch {self.micro + 1} of {self.accumulate}" if self.accumulate > 1 else ""
            add_note(f"in step {self.steps + 1}{number} of the trainer, whose batch is {described(batch)}")
            if hint := _hint(error, batch, model):
                add_note(hint)

    def forget_weights(self) -> None:
        if self._total is not None:
            self._total.zero_()

    def reset(self) -> None:
        self.micro, self._weighted, self._counted = 0, None, -1
        self.forget_weights()

    def state(self) -> dict[str, Tensor | int | float | None]:
        return {
            "micro": self.micro,
            "accumulate": self.accumulate,
            "divisor": self.divisor,
            "unit": self._unit,
            "total": self._total if self._weighted else None,
        }

    def load_state(self, micro: int, unit: float | None, total: Tensor | None) -> None:
        self.reset()
        self.micro = micro
        self._unit = unit
        self._weighted = total is not None if micro else None
        if total is not None:
            self._total = torch.zeros((), device=self._device).copy_(total)

    def _checked(self, weight: float | Tensor) -> Tensor:
        if isinstance(weight, Tensor):
            if weight.numel() != 1:
                raise TrainingError(
                    f"the weight of a micro-batch has shape {tuple(weight.shape)}", remedy="give a number or a scalar"
                )
            return weight.detach().reshape(()).to(self._device, torch.float32)
        if self._tensors_only:
            raise TrainingError(
                f"the weight of a micro-batch is the number {weight!r}, and graph=True needs a tensor",
                remedy="return a scalar tensor that is computed from the batch, or remove graph=True",
            )
        if not is_number(weight) or not 0 <= weight < math.inf:
            remedy = "give the number of examples of its mean, as a number >= 0 or a scalar tensor"
            raise TrainingError(f"{weight!r} is not a valid weight of a micro-batch", remedy=remedy)
        return torch.full((), float(weight), device=self._device)


def _hint(error: Exception, batch: Any, model: nn.Module) -> str:
    """Return what to do about a graph that was freed, a batch without tensors, or dtypes that differ; or ""."""
    if "backward through the graph a second time" in str(error):
        return (
            "the loss depends on a tensor that was computed before this batch, such as a hidden state: detach() what "
            "you keep. Or the loss function calls backward() itself: remove that; or torch.autograd.grad(...): give it "
            "retain_graph=True"
        )
    # A loss may tokenize or decode its batch itself: then other errors have nothing to do with this.
    if not tensors(batch):
        if isinstance(error, TypeError | AttributeError):
            return (
                "the batch has no tensor: if the loss function makes none of its values, let a collate_fn do it, as by "
                "torch.as_tensor(array)"
            )
        if isinstance(error, RuntimeError) and "same device" in str(error):
            return (
                "tensors in other objects than dicts, lists, tuples and dataclasses stay where they are: use one of "
                "these, or give the batch's class a method to(device) that returns the batch"
            )
        return ""
    given = {tensor.dtype for tensor in tensors(batch) if tensor.is_floating_point()}
    held = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    is_theirs = type(error) is RuntimeError and re.search(r"\bd?type", str(error)) is not None
    if not is_theirs or _WHOLE.search(str(error)) or not given - held or len(held) != 1:
        return ""
    (dtype,) = held
    floats, name = (" and ".join(sorted(str(each).removeprefix("torch.") for each in of)) for of in (given, held))
    another = (
        f', give Policy(model_dtype="{name}", cast_boundary=True), or keep the model in fp32 with precision="bf16"'
    )
    return (
        f"the batch has {floats} tensors, and the model's parameters are {name}: cast the batch, as by "
        f"tensor.to({dtype}) in the loss function{another if dtype in LOW_PRECISION else ''}"
    )

"""Windows: the micro-batches between two updates, their weights, and gradients that are not the trainer's own."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor

from accelcore.backend import Backend
from accelcore.errors import TrainingError, logger
from accelcore.optim.flat.memory import Slot
from accelcore.optim.shards import to_local
from accelcore.training.loss import UNTREATED
from accelcore.training.observers import Hooks
from accelcore.util.containers import described
from accelcore.util.text import is_number

_thread = threading.local()  # `holder`, in each thread: a weak reference to the parameters that are in use there
_of_trainers: list[None] = []  # an entry for each trainer that runs a backward pass now, in any thread
_all: WeakSet[SharedParameters] = WeakSet()


class Window:
    """Count and weigh the micro-batches of a window.

    A micro-batch's loss is a mean over examples. Backward multiplies its gradients by a *share*. At the end of the
    window all gradients are multiplied by a *correction*: 1 / (the sum of shares, averaged over ranks), so that the
    weights add up to 1. Without weights each share is `1 / accumulate`, and only a short window needs a correction.

    Weights are added up on the device, so that the host never waits for one. `divisor`: ranks add their gradients up,
    so backward divides by it, which costs nothing there. `tensors_only`: refuse a number as a weight, because a
    captured graph would keep its first value.
    """

    def __init__(self, accumulate: int, backend: Backend, *, divisor: int, tensors_only: bool) -> None:
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
            raise TrainingError(
                "some micro-batches of this window have a weight, and others do not",
                remedy="call backward(loss, weight=...) with a weight for every micro-batch, or for none",
            )
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

    def note(self, error: BaseException, batch: Any) -> None:
        """Add the step and the batch to an error of a micro-batch, where Python shows notes (3.11 or later)."""
        add_note = getattr(error, "add_note", None)  # the error keeps its class: a script may wait for OutOfMemoryError
        if add_note is not None and isinstance(error, Exception):
            number = f", micro-batch {self.micro + 1} of {self.accumulate}" if self.accumulate > 1 else ""
            add_note(f"in step {self.steps + 1}{number} of the trainer, whose batch is {described(batch)}")

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
            raise TrainingError(
                f"{weight!r} is not a valid weight of a micro-batch",
                remedy="give the number of examples of its mean, as a number >= 0 or a scalar tensor",
            )
        return torch.full((), float(weight), device=self._device)


class _OwnBackward:
    """Context in which backward passes are a trainer's. Others, by `loss.backward()`, are *foreign*."""

    def __enter__(self) -> None:
        _of_trainers.append(None)

    def __exit__(self, *_: object) -> None:
        _of_trainers.pop()


class SharedParameters:
    """Parameters of one trainer, whose `grad` others may use between its calls.

    The loss of one trainer may run through the model of another, as a GAN's generator loss runs through the critic.
    The gradients of another trainer's open window are set aside meanwhile. Otherwise this costs one comparison.

    A `loss.backward()` of the script would add to the gradients of an open window, so it is refused there. Hooks detect
    it. Versions would not do: they also change if the script writes to a gradient, which is allowed. Hooks cost time in
    each step, and a single trainer needs none while each of its windows is one call. `leaves` returns the tensors for
    which autograd computes the gradients of the parameters.
    """

    own_backward = _OwnBackward()

    def __init__(self, slots: Sequence[Slot], leaves: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> None:
        self._slots, self._leaves = slots, leaves
        self._parameters = [slot.parameter for slot in slots]
        self._foreign: list[Tensor] = []  # the first leaf with a gradient of a foreign backward pass
        self._hooks: Hooks | None = None
        self._slot_of: dict[int, Slot] = {}  # of each leaf with a hook
        self._warned = False
        self._aside: list[Tensor | None] | None = None
        self.is_open = False  # whether the gradients must outlast the use by other trainers
        self.left: tuple[Tensor, int, Tensor, int] | None = None  # a parameter, its gradient, and their versions
        # Without hooks, a gradient of another trainer, or one from before this trainer, would count as a foreign one.
        for other in (others := list(_all)):
            other.watch()
        if others or self._first_foreign() is not None:
            self.watch()
        _all.add(self)

    def acquire(self) -> None:
        """Put this trainer's gradients on the parameters, as it left them."""
        holder: SharedParameters | None = getattr(_thread, "holder", lambda: None)()
        if holder is self:
            return
        if holder is not None:
            holder.watch()
            self.watch()
        if holder is not None and holder.is_open:
            holder._aside = [parameter.grad for parameter in holder._parameters]
            for parameter in holder._parameters:
                parameter.grad = None
        if self._aside is not None:
            for parameter, gradient in zip(self._parameters, self._aside, strict=True):
                parameter.grad = gradient
            self._aside = None
        _thread.holder = ref(self)

    def open(self, *, warns: bool) -> bool:
        """Open a window; return whether gradients may be left. If `warns`, report a foreign backward pass once."""
        slot = self._first_foreign()
        if slot is not None and warns and not self._warned:
            self._warned = True
            logger.warning(
                "the parameter %r had a gradient before a window of the trainer, as loss.backward() leaves one. A "
                "window begins without gradients: it was dropped. Add the losses up before trainer.backward(loss), or "
                "call it for each. If the gradients train nothing, call torch.autograd.grad, or then model.zero_grad()",
                slot.name,
            )
        self.begin(opened=True)
        return slot is not None or self._hooks is not None

    def watch(self) -> None:
        """Find foreign backward passes by hooks from now on."""
        if self._hooks is not None:
            return
        if not all(parameter.requires_grad for parameter in self._parameters):
            return  # some are frozen now: the next call finds them trained
        leaves = self._leaves(self._parameters)
        if not all(leaf.requires_grad for leaf in leaves):
            return
        self._hooks, foreign = Hooks(), self._foreign

        def note(leaf: Tensor) -> None:  # a hook lives as long as its leaf: it holds no reference to this object
            if not (_of_trainers or foreign):
                foreign.append(leaf)

        for slot, leaf in zip(self._slots, leaves, strict=True):
            self._slot_of[id(leaf)] = slot
            self._hooks.add(leaf.register_post_accumulate_grad_hook(note))

    def begin(self, *, opened: bool) -> None:
        """Forget the last window and foreign backward passes; `opened`: a window is open now."""
        self.is_open, self.left = opened, None
        self._foreign.clear()

    def check_foreign(self) -> None:
        """Raise TrainingError if a foreign backward pass has added to the gradients of the open window."""
        if self._foreign and self.is_open:
            raise TrainingError(
                "loss.backward() within a window has added to the gradient of the parameter "
                f"{self._slot_of[id(self._foreign[0])].name!r}",
                why=UNTREATED,
                remedy="add the losses up before trainer.backward(loss), or call it for each. If gradients shall train "
                "nothing, call torch.autograd.grad",
            )

    def note_left(self) -> None:
        """Note a gradient of the window, which outlasts this call, as the last backward pass has left it."""
        self.watch()
        held = ((slot.parameter, slot.parameter.grad) for slot in self._slots)
        self.left = next(((p, p._version, grad, grad._version) for p, grad in held if grad is not None), None)

    def check_left(self, *, counted: bool) -> None:
        """Raise TrainingError if the noted gradient was cleared. Waits for the device only if it was written to.

        Unless a micro-batch was `counted`, log once that the script has changed the parameter.
        DistributedDataParallel may move a gradient into the memory of a bucket.
        """
        if self.left is None:
            return
        parameter, updates, gradient, version = self.left
        if parameter._version != updates and not counted and not self._warned:
            self._warned = True
            logger.warning(
                "the parameters have changed between two calls of trainer.backward(...), and trainer.update() was not "
                "called: call it instead of optimizer.step()"
            )
        now = parameter.grad
        is_changed = now is not gradient or gradient._version != version
        found = (to_local(grad) for each in self._parameters if (grad := each.grad) is not None)
        if now is None or (is_changed and not any(grad.any() for grad in found)):
            raise TrainingError(
                "the gradients of a window were cleared before its update",
                why="zero_grad() was called, and the trainer adds gradients up until the window's update",
                remedy="remove optimizer.zero_grad() and model.zero_grad(): each window begins without gradients",
            )

    def _first_foreign(self) -> Slot | None:
        """Return the first parameter that has a gradient of a foreign backward pass, if there is one."""
        # Without hooks there is no other trainer, which could have left a gradient.
        searched = self._slots if self._hooks is None else [self._slot_of[id(leaf)] for leaf in self._foreign]
        return next((slot for slot in searched if slot.parameter.grad is not None), None)

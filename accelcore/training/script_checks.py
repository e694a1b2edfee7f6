"""Parameters that a script or another trainer may use between the calls of a trainer, and gradients of others there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from weakref import WeakSet, ref

from torch import Tensor

from accelcore.errors import TrainingError, logger
from accelcore.optim.flat.memory import Slot
from accelcore.optim.shards import to_local
from accelcore.training.observers import Hooks

UNTREATED = "gradients of loss.backward() are neither scaled, weighted nor averaged over ranks"

_thread = threading.local()  # `holder`, in each thread: a weak reference to the parameters that are in use there
_of_trainers: list[None] = []  # an entry for each trainer that runs a backward pass now, in any thread
_all: WeakSet[SharedParameters] = WeakSet()


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
        parameter, updates, *_ = self.left
        if parameter._version != updates and not counted and not self._warned:
            self._warned = True
            logger.warning(
                "the parameters have changed between two calls of trainer.backward(...), and trainer.update() was not "
                "called: call it instead of optimizer.step()"
            )
        if self._is_cleared():
            raise TrainingError(
                "the gradients of a window were cleared before its update",
                why="zero_grad() was called, and the trainer adds gradients up until the window's update",
                remedy="remove optimizer.zero_grad() and model.zero_grad(): each window begins without gradients",
            )

    def warn_if_zero(self) -> None:
        """Log that the script wrote to the gradients, and that all are 0. The loss, too, may have given them."""
        if self.left is not None and self.left[0].grad is not None and self._is_cleared():
            logger.warning(
                "all gradients of the first update are 0: it trains nothing. If zero_grad(set_to_none=False) was "
                "called after trainer.backward(loss), remove it: each window begins without gradients"
            )

    def _is_cleared(self) -> bool:
        assert self.left is not None
        parameter, _, gradient, version = self.left
        is_changed = parameter.grad is not gradient or gradient._version != version
        found = (to_local(grad) for each in self._parameters if (grad := each.grad) is not None)
        return is_changed and not any(grad.any() for grad in found)

    def _first_foreign(self) -> Slot | None:
        """Return the first parameter that has a gradient of a foreign backward pass, if there is one."""
        # Without hooks there is no other trainer, which could have left a gradient.
        searched = self._slots if self._hooks is None else [self._slot_of[id(leaf)] for leaf in self._foreign]
        return next((slot for slot in searched if slot.parameter.grad is not None), None)

"""Checks of what a script or another trainer does between the calls of a trainer: with gradients, calls and the model.

What would train wrongly raises, or is logged once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import attrgetter
from weakref import WeakSet, ref

from torch import Tensor, is_grad_enabled, nn
from torch.optim import Optimizer

from accelcore.errors import Once, TrainingError
from accelcore.jobs.collectives import Collectives
from accelcore.optim.flat.memory import Slot
from accelcore.optim.shards import to_local
from accelcore.training.observers import Hooks

UNTREATED = "gradients of loss.backward() are neither scaled, weighted nor averaged over ranks"

# Compared in every window, for every parameter: without a Python frame for each.
_TRAINABLE, _DTYPE = attrgetter("requires_grad"), attrgetter("dtype")

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

    def __init__(
        self, slots: Sequence[Slot], leaves: Callable[[Sequence[Tensor]], Sequence[Tensor]], log: Once
    ) -> None:
        self._slots, self._leaves, self._log = slots, leaves, log
        self._parameters = [slot.parameter for slot in slots]
        self._foreign: list[Tensor] = []  # the first leaf with a gradient of a foreign backward pass
        self._hooks: Hooks | None = None
        self._slot_of: dict[int, Slot] = {}  # of each leaf with a hook
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

    def open(self) -> bool:
        """Open a window; return whether gradients may be left. Log once that a foreign backward pass has left some."""
        slot = self._first_foreign()
        if slot is not None:
            self._log.warn(
                "the parameter %r had a gradient before a window of the trainer, as loss.backward() leaves one. A "
                "window begins without gradients: it was dropped. Add the losses up before trainer.backward(loss), or "
                "call it for each. If the gradients train nothing, call torch.autograd.grad, or then model.zero_grad()",
                slot.name,
            )
        self.forget()
        self.is_open = True
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

    def forget(self) -> None:
        """Forget the last window and foreign backward passes. No window is open then."""
        self.is_open, self.left = False, None
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
        if parameter._version != updates and not counted:
            self._log.warn(
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
        if self._log.is_written and self.left is not None and self.left[0].grad is not None and self._is_cleared():
            self._log.warn(
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


class ScriptCalls:
    """Calls of the script for each batch, to detect calls that miss, and epochs that train nothing.

    It also sets whether an optimizer by name accepts a call of `step`, which is right only while the trainer updates.

    Attributes:
        added: whether a backward pass was added that no micro-batch has counted.
    """

    def __init__(self, optimizer: Optimizer, job: Collectives, accumulate: int, log: Once) -> None:
        self._optimizer, self._job, self._accumulate, self._log = optimizer, job, accumulate, log
        self._binding = getattr(optimizer, "binding", None)
        self.forget()
        self.expect_step(False)

    def check_bound(self) -> None:
        """Raise TrainingError if another trainer has bound the optimizer."""
        if getattr(self._optimizer, "binding", None) is not self._binding:
            raise TrainingError(
                "another trainer has bound this optimizer", remedy="give each trainer an optimizer of its own"
            )

    def expect_step(self, is_due: bool) -> None:
        """Let an optimizer by name refuse `step`, but while the trainer updates."""
        if self._binding is not None:
            self._binding.is_due = is_due

    def forget(self) -> None:
        """Forget the calls of the last window."""
        self.added = False
        self._place: object = None  # in the data, of the first loss of a micro-batch
        # The steps of all trainers of the job when the epoch began; None after an update, and outside of an epoch.
        self._steps_at_epoch: dict[int, tuple[int, int]] | None = None

    def note_update(self, call: str) -> None:
        """Note the call that counts a micro-batch."""
        self.added = False
        if self._binding is not None:
            self._binding.updated_by = call

    def note_backward(self, place: object) -> None:
        """Note a backward pass; raise TrainingError if the micro-batch has gradients from another place in the data.

        With micro-batches of one, a script may add up the gradients of several batches.
        """
        if self.added and self._place not in (None, place) and self._accumulate > 1:
            raise TrainingError(
                "trainer.backward(loss) was called for a second batch, and trainer.update() was not called after the "
                "first",
                why="trainer.update() counts micro-batches, and updates the parameters after the last of accumulate=. "
                "Without it, both batches count as one",
                remedy="call trainer.update() after each batch, not only after the last of a window",
            )
        self._place, self.added = place, True
        if self._binding is not None:
            self._binding.updated_by = ""

    def epoch_begins(self) -> None:
        self._steps_at_epoch = dict(self._job.steps)

    def warn_if_idle(self) -> None:
        """Log once that no trainer of the job made a step since the epoch began."""
        if self._steps_at_epoch is not None and self._steps_at_epoch == self._job.steps:
            self._log.warn(
                "an epoch of trainer.batches(...) has ended without a step of a trainer, and counts as one of "
                "trainer.epochs(n): to train, call trainer(batch), or trainer.backward(loss) and trainer.update(), "
                "instead of loss.backward() and optimizer.step(); to evaluate, loop over trainer.evaluate(loader)"
            )


class ModelSnapshot:
    """The model's parameters and the optimizer's groups, as they were when the trainer was prepared.

    `rest` frees parameters that the strategy has gathered; the model then has the trained parameters.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, rest: Callable[[], None], log: Once) -> None:
        self._model, self._optimizer, self._rest, self._log = model, optimizer, rest, log
        self._training = True
        self._members = [list(group["params"]) for group in optimizer.param_groups]  # alive, so that ids stay theirs
        self._groups = self._groups_now()
        self._by_name = dict(model.named_parameters())
        self._parameters = list(self._by_name.values())
        self._trainable = list(map(_TRAINABLE, self._parameters))
        self._dtypes, self._strides = list(map(_DTYPE, self._parameters)), list(map(Tensor.stride, self._parameters))

    def check_known(self, *, trains: bool = False) -> None:
        """Raise TrainingError for a change of the known parameters or the optimizer's groups.

        If it `trains`, log once that the model is in evaluation mode.
        """
        if trains and self._model.training is not self._training and is_grad_enabled():  # else backward raises
            self._training = self._model.training
            if not self._training:
                self._log.warn(
                    "the model is trained in evaluation mode, without dropout, and with frozen BatchNorm statistics. "
                    "Call model.train() after loading a pretrained model, and after an evaluation of your own. If this "
                    "is on purpose, call eval() of the parts that are meant, such as of each BatchNorm"
                )
        if list(map(_DTYPE, self._parameters)) != self._dtypes:
            remedy = "cast it before, or set precision=Policy(model_dtype=...)"
            raise TrainingError("the model was cast after its trainer was made", remedy=remedy)
        # Kernels walk a parameter, its master and its state side by side; `weight.data.t()` keeps the address.
        if list(map(Tensor.stride, self._parameters)) != self._strides:
            raise self._changed()
        if list(map(_TRAINABLE, self._parameters)) != self._trainable or self._groups_now() != self._groups:
            raise self._changed()

    def check_model(self) -> None:
        """Do what `check_known` does, and walk the whole model for new parameters."""
        self.check_refreshable()
        self.check_known()
        # A frozen parameter, too, has to be moved to the device, and to be the same on all ranks.
        if any(name not in self._by_name for name, _ in self._model.named_parameters()):
            raise self._changed()

    def check_refreshable(self) -> None:
        """Raise TrainingError for changes that `Trainer.refresh` cannot follow: replaced or unknown parameters."""
        self._rest()
        now = dict(self._model.named_parameters())
        gone = [name for name, parameter in self._by_name.items() if now.get(name) is not parameter]
        known = {id(held) for group in self._optimizer.param_groups for held in group["params"]}
        known |= set(map(id, self._by_name.values()))
        strange = [name for name, parameter in now.items() if id(parameter) not in known and parameter.requires_grad]
        if gone or strange:
            what = f"{gone[0]!r} was removed or replaced" if gone else f"{strange[0]!r} is new, and in no group"
            raise TrainingError(
                f"the model's parameters have changed since its trainer was made: {what}",
                remedy="make optimizer and trainer again. A parameter that was only added can be given to "
                "optimizer.add_param_group, or frozen by requires_grad_(False); then call trainer.refresh()",
            )

    def _groups_now(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self._optimizer.param_groups]

    def _changed(self) -> TrainingError:
        said = []
        known = zip(self._by_name.items(), self._trainable, self._strides, strict=True)
        for (name, parameter), trainable, strides in known:
            if parameter.requires_grad != trainable:
                said.append(f"{name!r} was {'frozen' if trainable else 'unfrozen'}")
            if parameter.stride() != strides:
                said.append(f"{name!r} has another memory layout")
        said += [f"{name!r} is new" for name, _ in self._model.named_parameters() if name not in self._by_name]
        if self._groups_now() != self._groups:
            said.append("the optimizer has other parameters in its groups")
        changes = ", ".join(said[:3]) + (f", and {len(said) - 3} more" if len(said) > 3 else "")
        return TrainingError(
            f"the model or the optimizer has changed since its trainer was made: {changes}",
            remedy="call trainer.refresh() after a change: between two windows, and on all ranks of a job",
        )


def no_update(when: str) -> TrainingError:
    """Return the error for gradients that no update has used until `when`."""
    return TrainingError(
        f"{when}, and trainer.update() was not called before: the trainer has changed no weight",
        why="trainer.backward(loss) only adds gradients up",
        remedy="call trainer.update() after each trainer.backward(loss), and not optimizer.step(); to update once an "
        "epoch, make the trainer with accumulate=len(loader) as well",
    )

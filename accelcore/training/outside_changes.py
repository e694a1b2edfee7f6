"""Detect changes of the model and the optimizer that a trainer was prepared for, or did not make."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from torch import Tensor, is_grad_enabled, nn
from torch.optim import Optimizer

from accelcore.errors import TrainingError, logger
from accelcore.jobs.collectives import Collectives

# Compared in every window, for every parameter: without a Python frame for each.
_TRAINABLE, _DTYPE = attrgetter("requires_grad"), attrgetter("dtype")


class ModelSnapshot:
    """The model's parameters and the optimizer's groups, as they were when the trainer was prepared.

    `rest` frees parameters that the strategy has gathered; the model then has the trained parameters.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, rest: Callable[[], None]) -> None:
        self._model, self._optimizer, self._rest = model, optimizer, rest
        self._training, self._warned = True, False
        self._members = [list(group["params"]) for group in optimizer.param_groups]  # alive, so that ids stay theirs
        self._groups = self._groups_now()
        self._by_name = dict(model.named_parameters())
        self._parameters = list(self._by_name.values())
        self._trainable = list(map(_TRAINABLE, self._parameters))
        self._dtypes, self._strides = list(map(_DTYPE, self._parameters)), list(map(Tensor.stride, self._parameters))

    def check(self, *, warns: bool = False) -> None:
        """Raise TrainingError for a change of the known parameters or the optimizer's groups.

        If it `warns`, log once that the model is in evaluation mode.
        """
        if warns and self._model.training is not self._training and is_grad_enabled():  # else backward raises
            self._training = self._model.training
            if not self._training and not self._warned:
                self._warned = True
                logger.warning(
                    "the model is trained in evaluation mode, without dropout, and with frozen BatchNorm statistics. "
                    "Call model.train() after loading a pretrained model, and after an evaluation of your own. If this "
                    "is on purpose, call eval() of the parts that are meant, such as of each BatchNorm"
                )
        if list(map(_DTYPE, self._parameters)) != self._dtypes:
            raise TrainingError(
                "the model was cast after its trainer was made",
                remedy="cast it before, or set precision=Policy(model_dtype=...)",
            )
        # Kernels walk a parameter, its master and its state side by side; `weight.data.t()` keeps the address.
        if list(map(Tensor.stride, self._parameters)) != self._strides:
            raise self._changed()
        if list(map(_TRAINABLE, self._parameters)) != self._trainable or self._groups_now() != self._groups:
            raise self._changed()

    def check_model(self) -> None:
        """Do what `check` does, and walk the whole model for new parameters."""
        self.check_refreshable()
        self.check()
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


class ScriptCalls:
    """Calls of the script for each batch, to detect calls that miss, and epochs that train nothing.

    It also sets whether an optimizer by name accepts a call of `step`, which is right only while the trainer updates.

    Attributes:
        added: whether a backward pass was added that no micro-batch has counted.
        began: the steps of all trainers of the job when the epoch began; None after an update, and outside of an epoch.
    """

    def __init__(self, optimizer: Optimizer, job: Collectives, accumulate: int) -> None:
        self._optimizer, self._job, self._accumulate = optimizer, job, accumulate
        self._binding = getattr(optimizer, "binding", None)
        self._warned = False
        self.begin(opened=False)
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

    def begin(self, *, opened: bool) -> None:
        """Begin a window, or, if `opened`, continue one."""
        self.added = opened
        self._place: object = None  # in the data, of the first loss of a micro-batch
        self.began: dict[int, tuple[int, int]] | None = None

    def note(self, call: str) -> None:
        """Note the call that counts a micro-batch, or "" for a backward pass."""
        self.added = not call
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
        self._place = place
        self.note("")

    def epoch_begins(self) -> None:
        self.began = dict(self._job.steps)

    def warn_if_idle(self) -> None:
        """Log once that no trainer of the job made a step since the epoch began."""
        if self.began is None or self.began != self._job.steps or self._warned:
            return
        self._warned = True
        if self._job.rank == 0:
            logger.warning(
                "an epoch of trainer.batches(...) has ended without a step of a trainer, and counts as one of "
                "trainer.epochs(n): to train, call trainer(batch), or trainer.backward(loss) and trainer.update(), "
                "instead of loss.backward() and optimizer.step(); to evaluate, loop over trainer.evaluate(loader)"
            )

"""Detect a script that trains without its trainer, or calls `trainer.update()` at the wrong places."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelcore.errors import logger
from accelcore.jobs.collectives import Collectives
from accelcore.training.loss import no_step, no_update_between

BATCH = "trainer(batch)"


class CallsOfUpdate:
    """The calls that a script makes for a micro-batch, for what errors advise.

    Attributes:
        last: `BATCH` or "trainer.update()" if that was the trainer's last call, else "".
        added: whether a backward pass was added that no micro-batch has counted.
    """

    def __init__(self, optimizer: Optimizer, accumulate: int) -> None:
        self._binding = getattr(optimizer, "binding", None)
        updated = (each for group in optimizer.param_groups for each in group["params"])
        self._updated: Tensor = next(updated, torch.empty(0))  # any of what it updates; a group may be empty
        self._version: int | None = None  # its version when a window's first backward began, until that is compared
        self._sums_batches = accumulate == 1  # then a script may add up the gradients of several batches
        self.last = ""
        self.begin(opened=False)

    def begin(self, *, opened: bool) -> None:
        """Begin a window, or, if `opened`, continue one."""
        self.added = opened
        self._place: object = None  # of the micro-batch's first loss in the data

    def window_opened(self) -> None:
        self._version = self._updated._version

    def warn_if_updated(self) -> None:
        """Warn if the script has updated the parameters since the window's first backward pass."""
        if self._version is not None and self._updated._version != self._version:
            self._version = None
            logger.warning(
                "the parameters have changed between two calls of trainer.backward(...), and trainer.update() was not "
                "called: call it instead of optimizer.step()"
            )

    def note_backward(self, place: object) -> None:
        """Note a backward pass; raise TrainingError if the micro-batch has gradients from another place in the data."""
        if self.added and self._place not in (None, place) and not self._sums_batches:
            raise no_update_between()
        self._place = place
        self.note("")

    def note(self, call: str) -> None:
        """Note the call that counts a micro-batch, or "" for a backward pass."""
        self.last, self.added = call, not call
        if self._binding is not None:
            self._binding.updated_by = call


class EpochWithoutSteps:
    """Detect an epoch over a trainer's batches in which the script trained without it, or nothing was trained.

    `began`: the steps of all trainers of the job, and how often each parameter was written to, when the epoch began;
    None after any update, and outside of an epoch.
    """

    def __init__(self, optimizer: Optimizer, job: Collectives) -> None:
        self._optimizer, self._job = optimizer, job
        self.began: tuple[dict[int, tuple[int, int]], list[int]] | None = None
        self._warned = False

    def begin(self) -> None:
        self.began = dict(self._job.steps), self._versions()

    def check(self, when: str) -> bool:
        """Return whether no trainer made a step since the epoch began; raise TrainingError if the script trained."""
        if self.began is None or self.began[0] != self._job.steps:
            return False
        if all(map(int.__gt__, versions := self._versions(), self.began[1])) and versions:
            raise no_step(f"{when}, and the script changed the parameters without the trainer")
        return True

    def end(self, *, had_batches: bool) -> None:
        """Do what `check` does, and warn once of an epoch that `had_batches` and no step."""
        if self.check("an epoch has ended") and had_batches and not self._warned:
            self._warned = True
            if self._job.rank == 0:
                logger.warning(
                    "an epoch of trainer.batches(...) has ended without a step of a trainer: to train, call "
                    "trainer(batch), or trainer.backward(loss) and trainer.update(); to evaluate, loop over "
                    "trainer.evaluate(loader)"
                )

    def _versions(self) -> list[int]:
        members = (each for group in self._optimizer.param_groups for each in group["params"])
        return [each._version for each in members if each.requires_grad]

"""Stages: changes of the model and the optimizer before the training, and the order in which they are made.

All stages are checked before one is applied. A file has the stages of one subject. What a stage adds to the plan, such
as a strategy or gradients, has a place of its own in `training`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from accelcore.errors import DistributedError
from accelcore.training.agreement import all_or_none, train_alike, wait_for_all
from accelcore.training.plan import Plan, Stage
from accelcore.training.stages.activations import ActivationCheckpointing
from accelcore.training.stages.execution import Capture, Compile, Observe
from accelcore.training.stages.parameters import Bind, Cast, Place, Replicate, Shard

_ORDER = (Place, ActivationCheckpointing, Cast, Shard, Bind, Replicate, Observe, Compile, Capture)


class Preparation:
    """Take a plan through all stages: first every check, so that an error leaves model and optimizer unchanged.

    The ranks of a job do this together, and compare what they are about to train.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._stages: Sequence[Stage] = [stage() for stage in _ORDER]

    def check(self, what: str, first: Callable[[], None]) -> None:
        """Run `first` and every check, on all ranks together; `what` is the script's call, for errors."""
        backend = self._plan.backend
        wait_for_all(backend, what)
        with all_or_none(backend, "prepare this training", DistributedError):
            first()
            for stage in self._stages:
                stage.check(self._plan)
        if backend.collectives.world_size > 1:
            train_alike(self._plan)

    def repeat(self, first: Callable[[], None], give_up: Callable[[str, str, BaseException], None]) -> None:
        """Check and apply every stage again; `give_up` is called if this fails when another rank may have done it."""
        may_differ = self._plan.backend.collectives.world_size > 1  # another rank may have passed a check that failed
        try:
            self.check("trainer.refresh()", first)
            may_differ = True
            self.apply()
        except BaseException as error:
            if may_differ:
                give_up(
                    "trainer.refresh() failed, and its changes may be incomplete or differ between ranks",
                    "make the same change on all ranks before it; start the job again, from a checkpoint",
                    error,
                )
            raise

    def apply(self) -> None:
        for stage in self._stages:
            stage.apply(self._plan)

"""The order of the stages."""

from __future__ import annotations

from collections.abc import Sequence

from accelcore.errors import DistributedError
from accelcore.training.agreement import Agreement
from accelcore.training.description import describe
from accelcore.training.plan import Plan, Stage
from accelcore.training.stages.bind import Bind
from accelcore.training.stages.capture import Capture
from accelcore.training.stages.cast import Cast
from accelcore.training.stages.compiled import Compile
from accelcore.training.stages.flatten import Flatten
from accelcore.training.stages.observe import Observe
from accelcore.training.stages.place import Place
from accelcore.training.stages.recompute import Recomputing
from accelcore.training.stages.replicate import Replicate
from accelcore.training.stages.shard import Shard
from accelcore.training.stages.sync_batchnorm import SyncStatistics

__all__ = ["Preparation"]

_ORDER = (Place, SyncStatistics, Recomputing, Cast, Shard, Flatten, Bind, Replicate, Observe, Compile, Capture)


class Preparation:
    """Takes a plan through all stages: first every check, so that what is refused leaves everything as it was.

    The ranks of a job do so together, and what they train has to be the same.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._stages: Sequence[Stage] = [stage() for stage in _ORDER]
        self._check_together("accel.trainer(...)")
        self._apply()

    def repeat(self, changes: str) -> None:
        """Take it through once more, because of `changes` in what is trained."""
        self._plan.strategy.rest()
        remedy = "make the change on all ranks, before the same step, and not under `if rank == 0:`"
        self._check_together(f"a change of what is trained: {changes}", remedy)
        self._apply()

    def _check_together(self, what: str, remedy: str | None = None) -> None:
        """Every check, on all ranks of a job, and that they are about to train the same."""
        backend = self._plan.backend
        if backend.collectives.world_size == 1:
            self._check()
            return
        agreement, failure = Agreement(backend.collectives, backend.device), None
        agreement.meet(what, remedy)
        try:
            self._check()
        except Exception as error:  # noqa: BLE001  # raised by `settle`, when all ranks know
            failure = error
        agreement.settle(failure, "prepare this training", DistributedError)
        agreement.train_alike(describe(self._plan))

    def _check(self) -> None:
        for stage in self._stages:
            stage.check(self._plan)

    def _apply(self) -> None:
        for stage in self._stages:
            stage.apply(self._plan)

"""Prepare a training: take its plan through all stages in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from accelcore.errors import DistributedError
from accelcore.training.agreement import Agreement, describe
from accelcore.training.plan import Plan, Stage
from accelcore.training.stages.cast import Cast
from accelcore.training.stages.execution import Capture, Compile
from accelcore.training.stages.flatten import Bind, Flatten
from accelcore.training.stages.observe import Observe
from accelcore.training.stages.place import Place, SyncStatistics
from accelcore.training.stages.recompute import ActivationCheckpointing
from accelcore.training.stages.shard import Replicate, Shard

__all__ = ["Preparation"]

_ORDER = (
    Place,
    SyncStatistics,
    ActivationCheckpointing,
    Cast,
    Shard,
    Flatten,
    Bind,
    Replicate,
    Observe,
    Compile,
    Capture,
)


class Preparation:
    """Take a plan through all stages: first every check, so that an error leaves model and optimizer unchanged.

    The ranks of a job do this together, and compare what they are about to train.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._stages: Sequence[Stage] = [stage() for stage in _ORDER]
        self._check_together("accel.trainer(...)")
        self._apply()

    def repeat(self, check: Callable[[], None]) -> None:
        """Go through the stages again; `check` raises for a change of the model that cannot be followed."""
        self._plan.strategy.reset()
        self._check_together("trainer.refresh()", check)
        self._apply()

    def _check_together(self, what: str, check: Callable[[], None] = lambda: None) -> None:
        collectives, device = self._plan.backend.collectives, self._plan.backend.device
        agreement = Agreement(collectives, device) if collectives.world_size > 1 else None
        if agreement is not None:
            agreement.meet(what)
        with nullcontext() if agreement is None else agreement.together("prepare this training", DistributedError):
            check()
            for stage in self._stages:
                stage.check(self._plan)
        if agreement is not None:
            agreement.train_alike(describe(self._plan))

    def _apply(self) -> None:
        for stage in self._stages:
            stage.apply(self._plan)

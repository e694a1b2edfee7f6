"""SyncStatistics: BatchNorm takes the statistics of all ranks' rows."""

from __future__ import annotations

from torch import nn

from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.torch_internals import AnyBatchNorm
from accelcore.training.plan import Plan

__all__ = ["SyncStatistics"]


class SyncStatistics:
    """Puts torch's SyncBatchNorm in the place of each BatchNorm, with the same parameters, where that was asked for."""

    def check(self, plan: Plan) -> None:
        wanted, backend = plan.options["sync_batchnorm"], plan.backend
        if not isinstance(wanted, bool):
            raise ConfigurationError(f"sync_batchnorm={wanted!r} is neither True nor False")
        if not wanted or backend.collectives.world_size == 1:
            return
        if not backend.capabilities.sync_batchnorm:
            raise UnsupportedError(
                f"{backend.name} has no BatchNorm over ranks",
                why="the backend does not declare it: torch's SyncBatchNorm has no kernels there",
                remedy="leave sync_batchnorm out, or take a normalization that looks at each row by itself",
            )
        if isinstance(plan.model, AnyBatchNorm) and not isinstance(plan.model, nn.SyncBatchNorm):
            raise ConfigurationError(
                "the model itself is a BatchNorm, which cannot be replaced", remedy="make it a part of a model"
            )

    def apply(self, plan: Plan) -> None:
        if plan.options["sync_batchnorm"] and plan.backend.collectives.world_size > 1:
            nn.SyncBatchNorm.convert_sync_batchnorm(plan.model)  # type: ignore[no-untyped-call]

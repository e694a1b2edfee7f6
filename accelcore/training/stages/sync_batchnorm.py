"""SyncStatistics: let BatchNorm use the statistics of all ranks."""

from __future__ import annotations

from torch import nn

from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.torch_internals import AnyBatchNorm
from accelcore.training.plan import Plan

__all__ = ["SyncStatistics"]


class SyncStatistics:
    """Replace each BatchNorm by torch's SyncBatchNorm, with the same parameters, if `sync_batchnorm=True`."""

    def check(self, plan: Plan) -> None:
        wanted, backend = plan.options["sync_batchnorm"], plan.backend
        if not isinstance(wanted, bool):
            raise ConfigurationError(f"sync_batchnorm={wanted!r} is not True or False")
        if not wanted or backend.collectives.world_size == 1:
            return
        if not backend.capabilities.sync_batchnorm:
            raise UnsupportedError(
                f"{backend.name} does not support sync_batchnorm",
                why="torch's SyncBatchNorm has no kernels on this device",
                remedy="leave sync_batchnorm out, or use LayerNorm or GroupNorm",
            )
        if isinstance(plan.model, AnyBatchNorm) and not isinstance(plan.model, nn.SyncBatchNorm):
            raise ConfigurationError(
                "the model itself is a BatchNorm, which cannot be replaced", remedy="make it a submodule of a model"
            )

    def apply(self, plan: Plan) -> None:
        if plan.options["sync_batchnorm"] and plan.backend.collectives.world_size > 1:
            nn.SyncBatchNorm.convert_sync_batchnorm(plan.model)  # type: ignore[no-untyped-call]

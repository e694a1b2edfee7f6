"""Reading evaluation data: every row once over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelcore.training.data.data_stream import Batches
from accelcore.training.data.sharding import share_once

if TYPE_CHECKING:
    from accelcore.backend import Backend

__all__ = ["Evaluation"]


class Evaluation:
    """Evaluation of a model that is being trained.

    Args:
        backend: the device, and the job.
        model: the model to evaluate.
        make_region: returns a new context for the forward pass.
    """

    def __init__(
        self, backend: Backend, model: nn.Module, make_region: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._backend, self._model, self._make_region = backend, model, make_region

    def batches(self, loader: Iterable[Any]) -> Batches:
        """Return this rank's share of `loader`; see `Trainer.evaluate`."""
        return Batches(self._evaluated(loader), lambda: len(self._share(loader)))  # type: ignore[arg-type]

    def _evaluated(self, loader: Iterable[Any]) -> Iterator[Any]:
        model, runtime = self._model, self._backend.runtime
        training = {module: module.training for module in model.modules()}
        model.eval()
        try:
            for batch in self._share(loader):
                moved = runtime.to_device(batch)
                with torch.no_grad(), self._make_region():  # not around the loader, which may compute too
                    yield moved
        finally:
            model.train(training[model])  # a subclass may override it; the flags of its submodules are restored below
            for module, before in training.items():
                module.training = before

    def _share(self, loader: Iterable[Any]) -> Iterable[Any]:
        job = self._backend.collectives
        return loader if job.world_size == 1 else share_once(loader, job, self._backend.device)

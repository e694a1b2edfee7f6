"""The runtime of a device beside the host: a queue, a random generator and pinned memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from accelcore.errors import CheckpointError
from accelcore.roles.runtime import TorchRuntime

__all__ = ["AcceleratorRuntime"]

T = TypeVar("T")


class AcceleratorRuntime(TorchRuntime):
    """A device that torch has a module for (`torch.get_device_module`), with streams, memory and random numbers.

    Its random state is saved under torch's name of the device.

    Args:
        device: with its index.
        graph: makes an empty graph of this device's; None where there are none.
        capture: options of the device's `graph` context, in which it is recorded.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        graph: Callable[[], Any] | None = None,
        capture: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(device)
        self._new_graph, self._capture_options = graph, capture or {}
        self._module: Any = torch.get_device_module(device)
        self._side: Any = None
        self._transfers: Any = None

    def rng_state(self) -> dict[str, Tensor]:
        return {**super().rng_state(), self.device.type: self._module.get_rng_state(self.device)}

    def set_rng_state(self, state: Mapping[str, Tensor]) -> list[str]:
        own = state.get(self.device.type)
        unknown = super().set_rng_state({name: value for name, value in state.items() if name != self.device.type})
        if own is not None:
            try:
                self._module.set_rng_state(own, self.device)
            except (RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"the saved random state of {self.device.type} does not fit this one", why=str(error)
                ) from error
        return unknown

    def prefetch(self, batch: T) -> Callable[[], T]:
        if self._transfers is None:
            self._transfers = self._module.Stream(self.device)
        with self._module.stream(self._transfers):
            moved = self.to_device(batch)
            arrived = self._transfers.record_event()

        def ready() -> T:
            user = self._module.current_stream(self.device)
            user.wait_event(arrived)
            for leaf in pytree.tree_leaves(moved):
                if isinstance(leaf, Tensor):  # its memory is the transfers' own, and must outlast its use
                    leaf.record_stream(user)
            return moved

        return ready

    def side_stream(self) -> AbstractContextManager[object]:
        return self._beside()

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    def capture(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        if self._new_graph is None:
            return super().capture(work)
        graph = self._new_graph()
        with self.side_stream() as side, self._module.graph(graph, stream=side, **self._capture_options):
            returned = work()
        return returned, graph.replay

    @contextmanager
    def _beside(self) -> Iterator[object]:
        if self._side is None:
            self._side = self._module.Stream(self.device)
        outer = self._module.current_stream(self.device)
        # Each waits for the other at both ends, so that memory freed on one may be used again on the other.
        self._side.wait_stream(outer)
        try:
            with self._module.stream(self._side):
                yield self._side
        finally:
            outer.wait_stream(self._side)

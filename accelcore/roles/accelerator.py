"""The runtime of a device beside the host: a random generator of its own, streams, graphs, pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accelcore.errors import CheckpointError
from accelcore.randomness import draws_on_host
from accelcore.roles.runtime import TorchRuntime
from accelcore.torch_internals import pytree

__all__ = ["AcceleratorRuntime"]

T = TypeVar("T")


class AcceleratorRuntime(TorchRuntime):
    """A device that torch has a module for (`torch.get_device_module`), with memory and random numbers.

    Its random state is saved under torch's name of the device. What it does not have it refuses, and prefetches
    without streams.

    Args:
        device: with its index.
        streams: whether work can be queued on streams of the module's. Declare the same.
        pinned_memory: whether `Tensor.pin_memory` pins for this device. Declare the same.
        graph: makes an empty graph of this device's; None where there are none.
        capture: options of the device's `graph` context, in which it is recorded.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        streams: bool = True,
        pinned_memory: bool = True,
        graph: Callable[[], Any] | None = None,
        capture: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(device)
        self._streams, self._pinned_memory = streams, pinned_memory
        self._new_graph, self._capture_options = graph, capture or {}
        self._module: Any = torch.get_device_module(device)
        self._side: Any = None
        self._transfers: Any = None

    def rng_state(self) -> dict[str, Tensor]:
        if draws_on_host():  # nothing is drawn from the device's own, which no other device could put back
            return super().rng_state()
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
        if not self._streams:
            return super().prefetch(batch)
        if self._transfers is None:
            self._transfers = self._module.Stream(self.device)
        with self._module.stream(self._transfers):
            with _Made() as made:
                moved = self.to_device(batch)
            arrived = self._transfers.record_event()

        def ready() -> T:
            user = self._module.current_stream(self.device)
            user.wait_event(arrived)
            for tensor in made.tensors:
                if tensor.device.type == self.device.type:  # its memory is the transfers' own, and must outlast its use
                    tensor.record_stream(user)
            return moved

        return ready

    def side_stream(self) -> AbstractContextManager[object]:
        return self._beside() if self._streams else super().side_stream()

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self._pinned_memory else super().pin(tensor)

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


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects every tensor that operators return, whatever kind of container, or `to` of a user's, asks for it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tensors += [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        return result

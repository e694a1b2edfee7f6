"""Runtime of a device beside the host: with its own random generator, streams and graphs."""

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
    """Device with memory and random numbers, for which torch has a module (`torch.get_device_module`).

    Its random state is saved under torch's name of the device. Every method reads `device`: a runtime that cannot be
    used in every process, such as after a fork, overrides that property to raise an error.

    Args:
        device: with its index.
        streams: whether the module has streams; declare the same. Without them `prefetch` is a plain copy.
        graph: makes an empty graph; None if the device has none.
        capture: options of the module's `graph` context, which records the graph.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        streams: bool = True,
        graph: Callable[[], Any] | None = None,
        capture: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(device)
        self._streams = streams
        self._new_graph, self._capture_options = graph, capture or {}
        self._module: Any = torch.get_device_module(device)
        self._side: Any = None
        self._transfers: Any = None

    def rng_state(self) -> dict[str, Tensor]:
        device = self.device
        if draws_on_host():  # the device's own generator is not used, and other devices could not restore its state
            return super().rng_state()
        return {**super().rng_state(), device.type: self._module.get_rng_state(device)}

    def set_rng_state(self, state: Mapping[str, Tensor]) -> list[str]:
        device = self.device
        own = state.get(device.type)
        unknown = super().set_rng_state({name: value for name, value in state.items() if name != device.type})
        if own is not None:
            try:
                self._module.set_rng_state(own, device)
            except (RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"the saved random state of {device.type} does not fit this device", why=str(error)
                ) from error
        return unknown

    def prefetch(self, batch: T) -> Callable[[], T]:
        if not self._streams:
            return super().prefetch(batch)
        device = self.device
        if self._transfers is None:
            self._transfers = self._module.Stream(device)
        with self._module.stream(self._transfers):
            with _Made() as made:
                moved = self.to_device(batch)
            arrived = self._transfers.record_event()

        def ready() -> T:
            user = self._module.current_stream(device)
            user.wait_event(arrived)
            for tensor in made.tensors:
                if tensor.device.type == device.type:  # the other stream's memory must not be reused before its use
                    tensor.record_stream(user)
            return moved

        return ready

    def side_stream(self) -> AbstractContextManager[object]:
        return self._beside(self.device) if self._streams else super().side_stream()

    def capture(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        if self._new_graph is None:
            return super().capture(work)
        side_stream, graph = self.side_stream(), self._new_graph()
        with side_stream as side, self._module.graph(graph, stream=side, **self._capture_options):
            returned = work()
        return returned, graph.replay

    @contextmanager
    def _beside(self, device: torch.device) -> Iterator[object]:
        if self._side is None:
            self._side = self._module.Stream(device)
        outer = self._module.current_stream(device)
        # Streams wait for each other at both ends, so that memory freed on one can be used on the other.
        self._side.wait_stream(outer)
        try:
            with self._module.stream(self._side):
                yield self._side
        finally:
            outer.wait_stream(self._side)


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects every tensor that operators return, also those made in a user's own `to` method."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tensors += [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        return result

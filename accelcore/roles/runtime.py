"""Contract of the role `runtime` and its defaults: random numbers, memory, transfers, streams and graphs."""

from __future__ import annotations

import dataclasses
import os
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from accelcore.devices.request import requested_trial
from accelcore.errors import CheckpointError, ConfigurationError, UnsupportedError
from accelcore.randomness import draw_on_device, draw_on_host, draws_on_host
from accelcore.torch_internals import pytree
from accelcore.util.containers import moved
from accelcore.util.text import first_line, kind_of

__all__ = ["AcceleratorRuntime", "Memory", "Runtime", "TorchRuntime", "fetch", "host_rng_state", "set_host_rng_state"]

T = TypeVar("T")

_ALIKE = 'seed(same="everywhere")'  # key of a state that says that the host drew for the device


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory figures in bytes.

    Attributes:
        used: memory in use: that of this process's tensors on a device, or of the whole process on a CPU.
        peak: the largest `used` since the process started.
        total: memory of the device.
    """

    used: int
    peak: int
    total: int


class Runtime(ABC):
    """One device of this process: its queue of work, random numbers, memory and transfers.

    Attributes:
        streams: whether torch's module of the device has streams, on which transfers overlap other work.
    """

    streams = False

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device, with its index if there are several."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work queued on the device is done."""

    @abstractmethod
    def seed(self, n: int, *, deterministic: bool = False, same: Literal["everywhere"] | None = None) -> None:
        """Seed the random generators of Python, torch, the device, and NumPy if it is loaded.

        Example:
            >>> accel.runtime.seed(0)
            >>> first = torch.rand(3)
            >>> accel.runtime.seed(0)
            >>> torch.equal(first, torch.rand(3))
            True

        Args:
            n: the seed, a whole number of at most 64 bits.
            deterministic: if true, torch refuses operators without a deterministic implementation for the rest of the
                process.
            same: with `"everywhere"`, the host draws all random numbers, so that every kind of device gets the same
                ones. This is slow, for comparing devices. It applies to the whole process until `seed` is called
                without it. What must draw on the device, such as a captured graph, raises UnsupportedError.

        Raises:
            ConfigurationError: `n` is not such a number, or `same` has another value.
            UnsupportedError: `same="everywhere"`, and torch lacks what it needs.
        """

    @abstractmethod
    def rng_state(self) -> dict[str, Tensor]:
        """Return the state of every generator that `seed` seeds, as CPU tensors."""

    @abstractmethod
    def set_rng_state(self, state: Mapping[str, Tensor]) -> list[str]:
        """Restore `rng_state`. Return the names of states for which this device has no generator."""

    @abstractmethod
    def memory(self) -> Memory:
        """Return how much memory is used."""

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context that queues work on another stream. It runs after earlier work, and later work waits for it.

        Raises:
            UnsupportedError: the backend declares no `streams`.
        """
        raise UnsupportedError(f"there are no side streams on {self.device}", remedy="queue the work without one")

    def capture(
        self, work: Callable[[], T], *, beside: Callable[[], None] | None = None
    ) -> tuple[T, Callable[[], None]]:
        """Record the work that `work` queues without running it; return its result and a function that runs it.

        Args:
            work: queues the work. Its result is memory of the recording, which each run overwrites.
            beside: the function that an earlier call returned. Both recordings then use the same memory for what they
                free. Each run may therefore overwrite the result of the other.

        Raises:
            UnsupportedError: the backend declares no `graphs`.
        """
        raise UnsupportedError(f"there are no graphs on {self.device}", remedy="queue the work without one")

    @final
    def to_device(self, batch: T) -> T:
        """Return a batch with its tensors on the device.

        Args:
            batch: a tensor, an object with a `to` method, or dicts, lists, tuples and dataclasses of these. Others
                in it are kept. Tensors that are already on the device are not copied.
        """
        _refuse_loader(batch)
        return moved(batch, self.device)

    @final
    def prefetch(self, batch: T) -> Callable[[], T]:
        """Begin to move a batch, and return a function that returns it for the work queued afterwards.

        With `streams`, transfers from pinned memory overlap other work.
        """
        _refuse_loader(batch)
        if not self.streams:
            moved = self.to_device(batch)
            return lambda: moved
        device = self.device
        module, transfers = torch.get_device_module(device), self._transfers
        with module.stream(transfers):
            with _Made() as made:
                moved = self.to_device(batch)
            arrived = transfers.record_event()

        def ready() -> T:
            user = module.current_stream(device)
            user.wait_event(arrived)
            for tensor in made.tensors:
                if tensor.device.type == device.type:  # the other stream's memory must not be reused before its use
                    tensor.record_stream(user)
            return moved

        return ready

    @cached_property
    def _transfers(self) -> Any:
        return torch.get_device_module(self.device).Stream(self.device)

    @final
    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to copy a tensor to the host, and return a function that waits for the copy and returns it.

        With `streams`, the function waits for the work queued before `fetch`, and not for later work.
        """
        if self.streams:
            return fetch(tensor)
        copy = tensor.detach().to("cpu", copy=True)
        return lambda: copy


def _refuse_loader(batch: object) -> None:
    if isinstance(batch, DataLoader | Dataset | Iterator):
        raise ConfigurationError(f"{kind_of(batch)} is not a batch", remedy="pass one batch: for batch in loader: ...")


class TorchRuntime(Runtime):
    """Device without a random generator of its own, whose transfers are plain copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def device(self) -> torch.device:
        return self._device

    def synchronize(self) -> None:
        torch.get_device_module(self.device).synchronize(self.device)

    def seed(self, n: int, *, deterministic: bool = False, same: Literal["everywhere"] | None = None) -> None:
        if not isinstance(n, int) or isinstance(n, bool) or not -(2**63) <= n < 2**64:
            raise ConfigurationError(f"{n!r} is not a seed", remedy="give a whole number of at most 64 bits, such as 0")
        if same not in (None, "everywhere"):
            raise ConfigurationError(
                f'same={same!r} must be None or "everywhere"',
                remedy='give same="everywhere" to compare devices, or remove it',
            )
        if (trial := requested_trial()) is not None:  # `accelcore advise` measures the noise of seeds
            n = (n + trial.seed) % 2**64
        kind = self.device.type
        if same is None:
            draw_on_device()
        else:
            draw_on_host(kind)
        random.seed(n)
        torch.manual_seed(n)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(n % 2**32)
        if deterministic:
            torch.use_deterministic_algorithms(True)

    def rng_state(self) -> dict[str, Tensor]:
        return {**host_rng_state(), **({_ALIKE: torch.ones((), device="cpu")} if draws_on_host() else {})}

    def set_rng_state(self, state: Mapping[str, Tensor]) -> list[str]:
        return [name for name in set_host_rng_state(state) if name != _ALIKE or not draws_on_host()]

    def memory(self) -> Memory:
        """Return the figures of torch's module of the device; of torch.accelerator; or of the process, on the host.

        Raises:
            UnsupportedError: torch reports none of them.
        """
        module = torch.get_device_module(self.device)
        if not hasattr(module, "memory_allocated"):
            return _memory_elsewhere(self.device)
        total: int = module.get_device_properties(self.device).total_memory
        return Memory(module.memory_allocated(self.device), module.max_memory_allocated(self.device), total)


def _memory_elsewhere(device: torch.device) -> Memory:
    statistics = Path("/proc/self/statm")
    if not (torch.empty(0, device=device).is_cpu and statistics.exists()):
        try:
            used, peak = torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device)
            return Memory(used, peak, torch.accelerator.get_memory_info(device)[1])
        except (AttributeError, RuntimeError, ValueError) as error:
            raise UnsupportedError(
                f"torch does not report the memory of {device}",
                why=first_line(error),
                remedy="override memory() in a subclass of AcceleratorRuntime, and give the backend that runtime",
            ) from error
    import resource  # only where it exists

    page = resource.getpagesize()
    used = int(statistics.read_text(encoding="ascii").split()[1]) * page
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Memory(used, max(used, peak), os.sysconf("SC_PHYS_PAGES") * page)


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
        self.streams = streams
        self._new_graph, self._capture_options = graph, capture or {}
        self._module: Any = torch.get_device_module(device)
        self._side: Any = None

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

    def side_stream(self) -> AbstractContextManager[object]:
        return self._beside(self.device) if self.streams else super().side_stream()

    def capture(
        self, work: Callable[[], T], *, beside: Callable[[], None] | None = None
    ) -> tuple[T, Callable[[], None]]:
        if self._new_graph is None:
            return super().capture(work)
        side_stream, graph = self.side_stream(), self._new_graph()
        pool = None if beside is None else cast("Any", beside).__self__.pool()
        with side_stream as side, self._module.graph(graph, stream=side, pool=pool, **self._capture_options):
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


def host_rng_state() -> dict[str, Tensor]:
    """Return the state of torch's CPU generator, of Python's `random`, and of NumPy if it is loaded, as tensors."""
    version, words, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64, device="cpu"),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64, device="cpu"),
    }
    if "numpy" in sys.modules:
        _, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64, device="cpu")
        state["numpy_gauss"] = torch.tensor([cached], dtype=torch.float64, device="cpu")
    return state


def set_host_rng_state(state: Mapping[str, Tensor]) -> list[str]:
    """Restore `host_rng_state`. Return the names of states without a generator."""
    unknown = set(state) - {"torch", "python", "python_gauss", "numpy", "numpy_gauss"}
    if not {"torch", "python", "python_gauss"} <= set(state):
        raise CheckpointError("the saved random state lacks the generators of torch or of Python")
    torch.set_rng_state(state["torch"])
    version, *words = state["python"].tolist()
    random.setstate((version, tuple(words), next(iter(state["python_gauss"].tolist()), None)))
    if "numpy" in state:
        import numpy  # not for every process

        *keys, position, has_gauss = state["numpy"].tolist()
        numpy.random.set_state(
            ("MT19937", numpy.array(keys, dtype=numpy.uint32), position, has_gauss, state["numpy_gauss"].item())
        )
    return sorted(unknown)


def fetch(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor of the host, or of a device with streams; see `Runtime.fetch`."""
    copy = tensor.detach().to("cpu", non_blocking=True, copy=True)
    if tensor.is_cpu:
        return lambda: copy
    arrived = torch.get_device_module(tensor.device).current_stream(tensor.device).record_event()

    def ready() -> Tensor:
        arrived.synchronize()
        return copy

    return ready


class _Made(TorchDispatchMode):
    """Collects every tensor that operators return, also those made in a user's own `to` method."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tensors += [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        return result

"""Runtime: the device itself, its random numbers, its memory, and the way onto it."""

from __future__ import annotations

import dataclasses
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Literal, TypeVar

import torch
from torch import Tensor

from accelcore.errors import CheckpointError, ConfigurationError, UnsupportedError
from accelcore.nested import moved
from accelcore.randomness import draw_on_device, draw_on_host, draws_on_host

__all__ = ["Memory", "Runtime", "TorchRuntime", "host_rng_state", "set_host_rng_state"]

T = TypeVar("T")

_ALIKE = 'seed(same="everywhere")'  # in the place of a state: that the host's was the device's, too


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory figures in bytes.

    Attributes:
        used: held now, by this process's tensors on a device, or by the process on a CPU.
        peak: the most that was held at one time since the process started.
        total: what the device has.
    """

    used: int
    peak: int
    total: int


class Runtime(ABC):
    """One device of this process."""

    device: torch.device

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work queued on the device is done."""

    @abstractmethod
    def seed(self, n: int, *, deterministic: bool = False, same: Literal["everywhere"] | None = None) -> None:
        """Seed the random generators of Python, torch, the device, and NumPy where it is loaded.

        Args:
            n: the seed.
            deterministic: also makes torch refuse operators that have no deterministic implementation, for the rest
                of the process.
            same: with `"everywhere"`, what is drawn on this kind of device and on the host is drawn on the host, and
                is the same on every device: slow, and for comparing two of them. So it is in the whole process until
                it is seeded without. What has to draw by itself raises UnsupportedError, such as a captured graph.

        Raises:
            ConfigurationError: `same` is anything else.
        """

    @abstractmethod
    def rng_state(self) -> dict[str, Tensor]:
        """The state of every generator that `seed` seeds, as CPU tensors."""

    @abstractmethod
    def set_rng_state(self, state: Mapping[str, Tensor]) -> list[str]:
        """Put `rng_state` back; returns the names of states that another kind of device wrote and this one has no
        generator for.
        """

    @abstractmethod
    def memory(self) -> Memory:
        """How much memory is used."""

    @abstractmethod
    def to_device(self, batch: T) -> T:
        """A batch with its tensors on the device.

        A tensor, anything with a `to` method, or dicts, lists, tuples and dataclasses of these. What else is in it
        stays as it is; tensors already there are not copied.
        """

    def tune(self) -> None:  # noqa: B027  # most devices have nothing to tune
        """Let the device try out which kernels are fastest for each shape, where it can: for batches of few shapes.

        It is the process's setting. Results may then differ in their last bits from run to run.
        """

    def prefetch(self, batch: T) -> Callable[[], T]:
        """Begin to move a batch, and return a function that gives it, for use by the work queued from then on.

        Where transfers can overlap work, those from pinned memory do.
        """
        moved = self.to_device(batch)
        return lambda: moved

    def side_stream(self) -> AbstractContextManager[object]:
        """A context whose work runs beside the work queued before it, and after which all later work waits for it.

        Raises:
            UnsupportedError: the backend declares no `streams`.
        """
        raise UnsupportedError(f"there are no side streams on {self.device}", remedy="queue the work as it comes")

    def capture(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Record the work that `work` queues, without doing it: what it returned, and a function that does it.

        What it returned is the recording's own memory, which each launch overwrites.

        Raises:
            UnsupportedError: the backend declares no `graphs`.
        """
        raise UnsupportedError(f"there are no graphs on {self.device}", remedy="queue the work as it comes")

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy of a CPU tensor in pinned memory, from which `to_device` transfers while the host goes on.

        Raises:
            UnsupportedError: the backend declares no `pinned_memory`.
        """
        raise UnsupportedError(f"there is no pinned memory for {self.device}", remedy="transfer it as it is")


class TorchRuntime(Runtime):
    """A device whose host is its only source of random numbers and whose transfers are plain copies."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        torch.get_device_module(self.device).synchronize(self.device)

    def seed(self, n: int, *, deterministic: bool = False, same: Literal["everywhere"] | None = None) -> None:
        if same not in (None, "everywhere"):
            raise ConfigurationError(
                f"same={same!r} is nowhere that random numbers can be the same",
                available='None, and "everywhere"',
                remedy='give same="everywhere" to compare devices, or leave it out',
            )
        if same is None:
            draw_on_device()
        else:
            draw_on_host(self.device.type)
        random.seed(n)
        torch.manual_seed(n)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(n % 2**32)
        if deterministic:
            torch.use_deterministic_algorithms(True)

    def rng_state(self) -> dict[str, Tensor]:
        return {**host_rng_state(), **({_ALIKE: torch.ones(())} if draws_on_host() else {})}

    def set_rng_state(self, state: Mapping[str, Tensor]) -> list[str]:
        return [name for name in set_host_rng_state(state) if name != _ALIKE or not draws_on_host()]

    def memory(self) -> Memory:
        module = torch.get_device_module(self.device)
        total: int = module.get_device_properties(self.device).total_memory
        return Memory(module.memory_allocated(self.device), module.max_memory_allocated(self.device), total)

    def to_device(self, batch: T) -> T:
        return moved(batch, self.device)


def host_rng_state() -> dict[str, Tensor]:
    """The generators of torch's CPU, of Python's `random`, and of NumPy where it is loaded, as tensors."""
    version, words, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }
    if "numpy" in sys.modules:
        _, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64)
        state["numpy_gauss"] = torch.tensor([cached], dtype=torch.float64)
    return state


def set_host_rng_state(state: Mapping[str, Tensor]) -> list[str]:
    """Put `host_rng_state` back; returns the names it has no generator for."""
    unknown = set(state)
    if {"torch", "python", "python_gauss"} - unknown:
        raise CheckpointError("the saved random state lacks the generators of torch or of Python")
    torch.set_rng_state(state["torch"])
    version, *words = state["python"].tolist()
    random.setstate((version, tuple(words), next(iter(state["python_gauss"].tolist()), None)))
    unknown -= {"torch", "python", "python_gauss"}
    if "numpy" in state:
        try:
            import numpy
        except ModuleNotFoundError:
            return sorted(unknown)
        *keys, position, has_gauss = state["numpy"].tolist()
        numpy.random.set_state(
            ("MT19937", numpy.array(keys, dtype=numpy.uint32), position, has_gauss, state["numpy_gauss"].item())
        )
        unknown -= {"numpy", "numpy_gauss"}
    return sorted(unknown)

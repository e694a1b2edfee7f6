"""Data parallelism: how the ranks' gradients become one. Strategies over torch's own engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accelcore.environment import read_launch
from accelcore.errors import ConfigurationError, DistributedError, TrainingError, UnsupportedError
from accelcore.roles.collectives import Collectives

__all__ = ["DDP", "Alone", "Parallel", "create_parallel"]


class Parallel(ABC):
    """One way to train one model on several ranks."""

    @abstractmethod
    def wrap(self, module: nn.Module) -> nn.Module:
        """The module to run in place of `module`; called once, with the parameters on their device."""

    @abstractmethod
    def open(self, micro_batches: int) -> None:
        """A window of that many micro-batches begins: gradients need to be exchanged in the last one only."""

    @abstractmethod
    def last(self) -> None:
        """The last micro-batch of the window begins."""

    @abstractmethod
    def check(self) -> None:
        """Before backward: raise TrainingError where these gradients would stay on this rank."""

    @abstractmethod
    def check_reduced(self) -> None:
        """After the last backward of a window: raise TrainingError where a gradient was not exchanged."""

    @abstractmethod
    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average the gradients of a window that ended before `last`."""


class Alone(Parallel):
    """One process: there is nobody to agree with."""

    def wrap(self, module: nn.Module) -> nn.Module:
        return module

    def open(self, micro_batches: int) -> None:
        pass

    def last(self) -> None:
        pass

    def check(self) -> None:
        pass

    def check_reduced(self) -> None:
        pass

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        pass


class DDP(Parallel):
    """torch's DistributedDataParallel: gradients are averaged in buckets while backward runs.

    Parameters and buffers of rank 0 are taken by all at the start, buffers again at the end of each window.

    Args:
        collectives: the job's.
        device: where the model is.
    """

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        self._collectives = collectives
        self._device_ids = None if device.index is None else [device.index]
        self._ddp: DistributedDataParallel
        self._local: AbstractContextManager[None] | None = None
        self._ran = False
        self._names: dict[int, str] = {}
        self._arrived: set[int] = set()

    def wrap(self, module: nn.Module) -> nn.Module:
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigurationError("the model has no parameter to train", remedy='use parallel="none"')
        self._ddp = DistributedDataParallel(module, device_ids=self._device_ids, gradient_as_bucket_view=True)
        self._ddp.register_forward_pre_hook(self._note_forward)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self._names[id(parameter)] = name
                parameter.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]
        return self._ddp

    def open(self, micro_batches: int) -> None:
        if micro_batches > 1 and self._local is None:
            self._local = self._ddp.no_sync()
            self._local.__enter__()

    def last(self) -> None:
        if self._local is not None:
            self._local.__exit__(None, None, None)
            self._local = None

    def check(self) -> None:
        if not self._ran:
            raise TrainingError(
                "backward was called, but the replicated model was not: gradients would stay on this rank",
                why="the forward pass went to your own module",
                remedy="call trainer.forward(...), or the model that loss(model, batch) is given",
            )
        self._ran = False
        self._arrived.clear()

    def check_reduced(self) -> None:
        # torch itself would notice at the next forward pass, after the ranks have stepped apart.
        if len(self._arrived) < len(self._names):
            missing = [name for key, name in self._names.items() if key not in self._arrived]
            raise TrainingError(
                f"{len(missing)} parameters received no gradient in the last backward of this window: {missing[0]}"
                + (", ..." if len(missing) > 1 else ""),
                why="their gradients were not exchanged, and the ranks would step apart",
                remedy="use every parameter in each forward pass, or freeze those with requires_grad_(False)",
            )

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        self.last()
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        received = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
        received = self._collectives.all_reduce(received.to(self._ddp.device), "max")
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter, anywhere in zip(trained, received.tolist(), strict=True):
            if anywhere:  # one that no rank received stays None, which an optimizer tells from zero
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for gradients in by_dtype.values():
            flat = self._collectives.all_reduce(torch.cat([gradient.flatten() for gradient in gradients]), "avg")
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def _note_forward(self, module: nn.Module, inputs: Any) -> None:
        self._ran = self._ran or torch.is_grad_enabled()

    def _note_gradient(self, parameter: Tensor) -> None:
        self._arrived.add(id(parameter))


_STRATEGIES: dict[str, Callable[[Collectives, torch.device], Parallel]] = {"ddp": DDP}
_NONE = "none"


def create_parallel(name: str, declared: tuple[str, ...], collectives: Collectives, device: torch.device) -> Parallel:
    """The strategy called `name`, which does nothing in a job of one process.

    Raises:
        UnsupportedError: the backend does not declare it.
        ConfigurationError: `"none"` in a job of several ranks.
        DistributedError: a launcher started several ranks, and they have not met.
    """
    offered = [strategy for strategy in declared if strategy == _NONE or strategy in _STRATEGIES]
    if name not in offered:
        raise UnsupportedError(
            f"parallel={name!r} does not exist here",
            why="the backend does not declare it",
            available=", ".join(f"parallel={strategy!r}" for strategy in offered),
            remedy="leave parallel out for a job of one process",
        )
    if collectives.world_size == 1:
        launch = read_launch()
        if name != _NONE and launch is not None and launch.world_size > 1:
            raise DistributedError(
                f"a launcher started {launch.world_size} ranks, and they have not met",
                why="each would train alone, on all the data",
                remedy="make and use the trainer inside `with accel.distributed():`",
            )
        return Alone()
    if name == _NONE:
        raise ConfigurationError(
            f'parallel="none" in a job of {collectives.world_size} ranks',
            why="every rank would train a model of its own, on its own share of the data",
            available=", ".join(offered),
            remedy='say parallel="ddp", or leave accel.distributed() out to run independent processes',
        )
    return _STRATEGIES[name](collectives, device)

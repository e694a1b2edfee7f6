"""Record a training."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.checkpoint.store import as_path
from accelcore.errors import ConfigurationError, RecordingError, UnsupportedError
from accelcore.optim.shards import is_sharded
from accelcore.parity.collector import Collector, Watched
from accelcore.parity.finder import Finder
from accelcore.parity.recording import Writer, check_place
from accelcore.parity.settings import gather
from accelcore.randomness import draw_on_device, draw_on_host
from accelcore.roles.runtime import host_rng_state
from accelcore.training.observers import Observer, observing
from accelcore.util.containers import tensors
from accelcore.util.text import is_number, is_whole

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from accelcore.parity.events import Step
    from accelcore.training.trainer import Trainer

__all__ = ["Record", "rank_now", "world_size_now"]

logger = logging.getLogger("accelcore")


class Record(Observer):
    """Record a training into a folder, to replay it elsewhere and name the first place where the two part.

    A context around a training, whatever its loop is::

        with accelcore.Record("ref"):
            train()

        with accelcore.Record("ref", model=model, optimizer=optimizer):    # only these
            for inputs, targets in loader:
                ...

    Or an observer of a trainer: `accel.trainer(..., observers=[accelcore.Record("ref")])`; call `close()` at the end.

    Torch's public hooks on the given model and optimizer, or on a trainer's, collect what happens. If none is given,
    torch's hooks on all modules and optimizers of the process find them, until the context ends. A *step* ends with
    `optimizer.step()`; steps are counted from 1. A forward pass under `no_grad` is not recorded. Several models are
    told apart by prefixes, `model2.` for the second.

    In each step, some two hundred elements are kept of each input of a module that functions have computed, of each
    output, of its gradient, of each parameter, buffer and gradient, and of each tensor of the optimizer's state. Before
    step 1, all weights and the states of the random generators are kept. The recorded run has the same bits as an
    unrecorded one. The modules of a compiled model are not seen.

    Args:
        folder: made if it does not exist; an older recording in it is replaced. Each rank writes a folder of its own.
        model, optimizer: what to record, if not everything: the model that the loop calls, compiled or replicated; a
            sequence for several. A model that was made before the context, and is not given, must be called with
            positional arguments first: torch's hooks on all modules do not show others.
        operators: steps in which each operator is recorded, too, so that it can be named: `range(1, 4)`. These steps
            are slow, and not recorded of compiled models.
        batches: whether all tensors that the models get are kept in full, so that a replay can take them. This waits
            for the device in each step, and needs the space.
        random: `"everywhere"` to draw random numbers on the host, so that another kind of device draws the same; this
            changes the numbers that are drawn. See `runtime.seed(n, same="everywhere")`.
        steps: how many steps to record; None for all.
        limit: weights of more bytes are not kept; a replay then begins with its own.

    Raises:
        ConfigurationError: an argument has a wrong type or value.
        RecordingError: the folder cannot be written, or holds something else than a recording.
        UnsupportedError: a trainer has `graph=True`.
    """

    measures_norm = False

    def __init__(
        self,
        folder: str | Path,
        *,
        model: nn.Module | Sequence[nn.Module] | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        operators: Iterable[int] = (),
        batches: bool = False,
        random: Literal["everywhere"] | None = None,
        steps: int | None = None,
        limit: float = 2e9,
    ) -> None:
        self._folder = as_path(folder)
        self._given = _checked(model, nn.Module, "model"), _checked(optimizer, Optimizer, "optimizer")
        if (model is None) != (optimizer is None):
            raise ConfigurationError("model and optimizer come together", remedy="give both, or neither")
        self._optimizers: WeakSet[Any] = WeakSet()
        self._operators = sorted(set(operators))
        if not all(is_whole(step, 1) for step in self._operators):
            raise ConfigurationError(f"operators={self._operators} are not steps", remedy="count steps from 1")
        if not isinstance(batches, bool):
            raise ConfigurationError(f"batches={batches!r} must be True or False")
        if random not in (None, "everywhere"):
            raise ConfigurationError(f'random={random!r} must be None or "everywhere"')
        if steps is not None and not is_whole(steps, 1):
            raise ConfigurationError(f"steps={steps!r} is not a number of steps", remedy="give 1 or more, or None")
        if not is_number(limit) or limit < 0:
            raise ConfigurationError(f"limit={limit!r} is not a number of bytes")
        if steps is not None and self._operators and self._operators[-1] > steps:
            raise ConfigurationError(
                f"operators={self._operators} has steps after the last one, steps={steps}", remedy="give a larger steps"
            )
        self._random, self._limit, self._steps, self._batches = random, limit, steps, batches
        self._kept: dict[str, Tensor] = {}
        self._trainers: list[Any] = []
        self._steps_by_trainer = False
        self._writer: Writer | None = None
        self._open = ExitStack()
        self._is_open = False
        self._checks = False

    def __enter__(self) -> Self:
        self._start()
        self._open.enter_context(observing(self))
        if not self._given[0]:
            self._open.enter_context(Finder(self._collector, self._is_updating))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(complete=error is None)

    def watch(self, model: nn.Module | Sequence[nn.Module], optimizer: Optimizer | Sequence[Optimizer], /) -> None:
        """Begin to record these, and nothing else, without a context: for a callback. Call `close` at the end.

        Raises:
            ConfigurationError: an argument has a wrong type.
        """
        self._given = _checked(model, nn.Module, "model"), _checked(optimizer, Optimizer, "optimizer")
        self._start()

    def begin(self, trainer: Trainer) -> None:
        if trainer.options["graph"]:
            raise UnsupportedError(
                "a training with graph=True cannot be recorded or replayed",
                why="the steps are captured once, and no hook runs when they are launched",
                remedy="leave graph=True out while you compare",
            )
        self._start()
        self._trainers.append(trainer)
        self._steps_by_trainer = True
        if not self._collector.knows(trainer.model):
            compiled = None if trainer.compiled is None else trainer.compiled.module
            self._collector.watch(compiled if isinstance(compiled, nn.Module) else trainer.model, trainer.model)
        self._watch_optimizer(trainer.optimizer, ends=False)

    def loss(self, loss: Tensor) -> None:
        """Record a loss. A trainer calls it; in a loop of your own it is optional."""
        if self._is_open:
            self._collector.see("loss", "loss", loss)

    def gradient_norm(self, norm: Tensor) -> None:
        self._collector.see("norm", "gradient norm", norm)

    def step(self, steps: int) -> None:
        """End a step. A trainer or an optimizer calls it."""
        self._end_step()

    def close(self, *, complete: bool = True) -> None:
        """Write what is not yet written, and remove all hooks."""
        if not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self.close)
        try:
            last = self._collector.last()
            if last is not None:
                self._took(last)
        finally:
            self._collector.close()
            self._open.close()
        if self._writer is not None:
            self._writer.change(complete=complete)
            self._writer.flush()
            last_step = self._collector.step - 1
            if missed := [step for step in self._operators if step > last_step]:
                logger.warning("the operators of steps %s were not recorded: the last step was %d", missed, last_step)
        elif complete:
            raise RecordingError(
                f"nothing was recorded into {self._folder}",
                why="no model ran a forward pass with gradients in the context, or no optimizer made a step",
                remedy="open the context around the training, and give it the model and optimizer that are trained; if "
                "the script resumed a finished training, delete its checkpoints, or save in another folder",
            )

    def _start(self) -> None:
        """Begin to watch; do nothing if that was done."""
        if self._is_open:
            return
        check_place(self._folder)
        self._is_open = True
        self._collector = Collector(self._operators, self._begin_step, self._receive, checks=self._checks)
        atexit.register(self.close)
        self._at_start = host_rng_state()
        if self._random is not None:
            draw_on_host("cpu")
            self._open.callback(draw_on_device)
        for model in self._given[0]:
            self._collector.watch(model)
        for optimizer in self._given[1]:
            self._watch_optimizer(optimizer, ends=True)

    def _watch_optimizer(self, optimizer: Optimizer, *, ends: bool) -> None:
        self._optimizers.add(optimizer)
        self._collector.watch_optimizer(optimizer, self._end_step if ends else None)

    def _is_updating(self, optimizer: Optimizer) -> None:
        if optimizer not in self._optimizers and not self._steps_by_trainer:
            self._watch_optimizer(optimizer, ends=True)

    def _begin_step(self, watched: Watched, first: bool) -> None:
        """Called before the first forward pass of each model in a step; `first` in its first step."""
        if self._writer is None:
            if self._random is not None:
                draw_on_host(next(watched.model.parameters()).device.type)
            self._writer = Writer(self._folder, rank_now(), self._facts())
        if self._batches and not self._kept:
            self._kept["generator"] = torch.get_rng_state()
        if first:
            self._first_time(watched, self._writer)

    def _receive(self, watched: Watched, given: tuple[Any, Any]) -> tuple[Any, Any]:
        """Called with the arguments of each forward pass; returns those to use."""
        if self._batches:
            for number, tensor in enumerate(tensors(given)):
                if not tensor.requires_grad:  # else another model has made it, and a replay's makes it again
                    copy = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
                    self._kept[self._input_name(watched, number)] = copy
        return given

    def _input_name(self, watched: Watched, number: int) -> str:
        """Return the name of an input in the file of its step."""
        return f"{self._collector.models.index(watched)}.{watched.calls}.{number}"

    def _facts(self) -> dict[str, Any]:
        return {
            "settings": {},
            "generators": {name: state.tolist() for name, state in self._at_start.items()},
            "operators": self._operators,
            "random": self._random,
            "batches": self._batches,
            "complete": False,
        }

    def _first_time(self, watched: Watched, writer: Writer) -> None:
        """Keep the weights of a model before its first forward pass."""
        if not self._is_divided():  # state_dict would divide them again, between the gathering and the forward pass
            writer.weights(self._collector.models.index(watched), watched.model.state_dict(), self._limit)

    def _is_divided(self) -> bool:
        """Return whether ranks divide the weights: then a module has others before its forward pass than after it."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return any(is_sharded(parameter) for group in groups for parameter in group["params"])

    def _settings(self) -> dict[str, str]:
        return gather(self._collector.models, list(self._optimizers), self._trainers, world_size_now())

    def _end_step(self) -> None:
        if self._writer is not None and self._collector.step == 1:
            self._writer.change(settings=self._settings())
        if self._writer is not None and self._kept:
            self._writer.batches(self._collector.step, self._kept)
            self._kept = {}
        finished = self._collector.end_step()
        if finished is not None:
            self._took(finished)
        self._step_ended(self._collector.step - 1)
        if self._steps is not None and self._collector.step > self._steps and not self._collector.is_done:
            self._collector.is_done = True
            self._ended()

    def _step_ended(self, step: int) -> None:
        """Called after each step."""

    def _ended(self) -> None:
        """Called when as many steps were recorded as asked for."""

    def _took(self, step: Step) -> None:
        """Write a step whose samples have arrived."""
        assert self._writer is not None, "a step was begun"
        self._writer.add(step)


def rank_now() -> int:
    """Return this process's rank: of its process group, else as a launcher says."""
    if dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return int(os.environ.get("RANK") or 0)


def world_size_now() -> int:
    """Return the number of ranks of the process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _checked(given: Any, kind: type, name: str) -> list[Any]:
    listed = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    if strange := [each for each in listed if not isinstance(each, kind)]:
        raise ConfigurationError(
            f"{name}={strange[0]!r} is not {kind.__module__}.{kind.__qualname__}",
            remedy=f"give the {name}, or leave it out",
        )
    return listed

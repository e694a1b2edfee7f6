"""Record a training."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accelcore.checkpoint.folders import as_path
from accelcore.errors import ConfigurationError, RecordingError, UnsupportedError, logger
from accelcore.jobs.launchers import read_launch
from accelcore.optim.shards import is_sharded
from accelcore.parity.collector import Collector, Watched
from accelcore.parity.events import SeenStep
from accelcore.parity.recording import Writer, check_place
from accelcore.parity.settings import settings_of
from accelcore.randomness import draw_on_device, draw_on_host
from accelcore.roles.runtime import host_rng_state
from accelcore.training.observers import Hooks, Observer, observing
from accelcore.training.trainer import Trainer
from accelcore.util.containers import tensors
from accelcore.util.text import is_whole

if TYPE_CHECKING:
    from typing_extensions import Self

_LARGEST = 2e9  # bytes of a model's weights up to which they are kept; a replay of a larger one begins with its own


class Record(Observer):
    """Record a training into a folder, to replay it elsewhere and name the first place where the two diverge.

    A context around a training, whatever its loop is:

    >>> with accelcore.Record("ref"):
    ...     train()

    Or an observer of a trainer: `accel.trainer(..., observers=[accelcore.Record("ref")])`; call `close()` at the end.

    If neither model nor optimizer is given, torch's hooks on all modules and optimizers of the process find them. A
    *step* ends with `optimizer.step()`; steps are counted from 1. A forward pass under `no_grad` is not recorded, and
    the modules of a compiled model are not seen. Recording changes no bit of a step. It may change an evaluation:
    torch's fused kernel for `nn.TransformerEncoderLayer` does not run if a module has hooks.
    `save(keep=)` does not delete the checkpoint from which a recorded trainer has resumed: a replay begins there.

    Args:
        folder: made if it does not exist; an older recording in it is replaced. Each rank writes a folder of its own.
        model: the model to record, as the loop calls it, compiled or replicated; a sequence for several. None: all. A
            model that was made before the context, and is not given, must be called with positional arguments first:
            torch's hooks on all modules do not show others.
        optimizer: the optimizer whose steps are recorded; a sequence for several. Give it with `model`, or neither.
        operators: steps in which each operator is recorded, too, so that it can be named: `range(1, 4)`. These steps
            are slow, and not recorded of compiled models.
        batches: whether all tensors that the models get are kept in full, so that a replay can take them. This waits
            for the device in each step, and needs the space.
        random: `"everywhere"` to draw random numbers on the host, so that another kind of device draws the same; this
            changes the numbers that are drawn. See `runtime.seed(n, same="everywhere")`.
        steps: how many steps to record; None for all.

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
    ) -> None:
        self._folder = as_path(folder)
        self._given = _checked(model, nn.Module, "model"), _checked(optimizer, Optimizer, "optimizer")
        if (model is None) != (optimizer is None):
            raise ConfigurationError("model and optimizer come together", remedy="give both, or neither")
        if steps is not None and not is_whole(steps, 1):
            raise ConfigurationError(f"steps={steps!r} is not a number of steps", remedy="give 1 or more, or None")
        self._operators = sorted(set(operators))
        if not all(is_whole(step, 1) and step <= (steps or step) for step in self._operators):
            raise ConfigurationError(
                f"operators={self._operators} has a step that is not recorded",
                why=f"steps={steps}, counted from 1",
                remedy="name steps within those",
            )
        if random not in (None, "everywhere"):
            raise ConfigurationError(f"random={random!r} is unknown", remedy='give "everywhere" or None')
        self._random, self._steps, self._batches = random, steps, batches
        self._checks = False
        self._kept: dict[str, Tensor] = {}
        self._trainers: list[Any] = []
        self._writer: Writer | None = None
        self._open = ExitStack()
        self._is_open = False

    def __enter__(self) -> Self:
        self._start()
        self._open.enter_context(observing(self))
        if not self._given[0]:
            self._open.enter_context(_Finder(self._collector, self._is_updating))
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
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
                remedy="remove graph=True while you compare",
            )
        self._start()
        self._trainers.append(trainer)
        trainer.state.spares_start = True
        if trainer.model not in self._collector.known:
            compiled = None if trainer.compiled is None else trainer.compiled.module
            self._collector.watch(compiled if isinstance(compiled, nn.Module) else trainer.model, trainer.model)
        self._collector.watch_optimizer(trainer.optimizer, None)

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
            self._took(self._collector.last())
        finally:
            self._collector.close()
            self._open.close()
        if self._writer is not None:
            self._writer.write()
            last_step = self._collector.step - 1
            if missed := [step for step in self._operators if step > last_step]:
                logger.warning("the operators of steps %s were not recorded: the last step was %d", missed, last_step)
        elif complete:
            raise RecordingError(
                f"nothing was recorded into {self._folder}",
                why="no model ran a forward pass with gradients in the context, or no optimizer made a step. Calls in "
                "a transform of torch.func, such as vmap, are not seen",
                remedy="if the script resumed a finished training, delete its checkpoints, or save in another folder; "
                "a context must be open around the training, and get the model and optimizer that are trained",
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
            self._collector.watch_optimizer(optimizer, self._end_step)

    def _is_updating(self, optimizer: Optimizer) -> None:
        if not self._trainers:  # a trainer ends the steps itself
            self._collector.watch_optimizer(optimizer, self._end_step)

    def _begin_step(self, watched: Watched, first: bool) -> None:
        """Called before the first forward pass of each model in a step; `first` in its first step."""
        if self._writer is None:
            if self._random is not None:
                draw_on_host(next(watched.model.parameters()).device.type)
            began = max((each.steps for each in self._trainers), default=0)
            facts = {"operators": self._operators, "random": self._random, "batches": self._batches, "began": began}
            self._writer = Writer(self._folder, rank_and_size()[0], {"settings": {}, **facts})
            self._writer.keep("generators", self._at_start)
        if self._batches and not self._kept:
            self._kept["generator"] = torch.get_rng_state()
        weights = self._weights(watched) if first else {}
        if weights and sum(tensor.nbytes for tensor in weights.values()) <= _LARGEST:
            copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
            self._writer.keep(f"weights-{watched.number}", copies)

    def _receive(self, watched: Watched, given: tuple[Any, Any]) -> tuple[Any, Any]:
        """Called with the arguments of each forward pass; return those to use."""
        if self._batches:
            for number, tensor in enumerate(tensors(given)):
                if not tensor.requires_grad:  # else another model has made it, and a replay's makes it again
                    copy = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
                    self._kept[f"{watched.number}.{watched.calls}.{number}"] = copy
        return given

    def _weights(self, watched: Watched) -> dict[str, Tensor]:
        """Return the weights and buffers of a model; nothing if ranks divide them.

        A divided module has other weights before its forward pass than after it, and `state_dict` would divide them
        again in between.
        """
        groups = [group for optimizer in self._collector.optimizers for group in optimizer.param_groups]
        if any(is_sharded(parameter) for group in groups for parameter in group["params"]):
            return {}
        found = {name: value for name, value in watched.model.state_dict().items() if isinstance(value, Tensor)}
        return {} if any(map(is_sharded, found.values())) else found

    def _end_step(self) -> None:
        collector = self._collector
        if self._writer is not None and collector.step == 1:
            settings = settings_of(collector.models, collector.optimizers, self._trainers, rank_and_size()[1])
            self._writer.write(settings=settings)
        if self._writer is not None and self._kept:
            self._writer.keep(f"batches-{collector.step:08d}", self._kept)
            self._kept = {}
        self._took(collector.end_step())
        is_last = self._steps is not None and collector.step > self._steps and not collector.is_done
        collector.is_done |= is_last
        self._step_ended(collector.step - 1, is_last=is_last)

    def _step_ended(self, step: int, *, is_last: bool) -> None:
        """Called after each step; `is_last` if as many were recorded as asked for."""

    def _took(self, step: SeenStep | None) -> None:
        if step is not None and self._writer is not None:
            self._writer.add(step)


class _Finder(Hooks):
    """Watch each model at its first call with gradients, and report each optimizer before its updates, until `close`.

    The hook on all modules does not show keyword arguments. Modules that get a part from now on have a hook of their
    own, which does.
    """

    def __init__(self, collector: Collector, updating: Callable[[Optimizer], None]) -> None:
        super().__init__()
        self._collector = collector
        self._made: WeakSet[nn.Module] = WeakSet()
        self.add(
            register_module_module_registration_hook(self._made_by),
            register_module_parameter_registration_hook(self._made_by),
            register_module_forward_pre_hook(self._before_any_call),
            register_optimizer_step_pre_hook(lambda optimizer, *_: updating(optimizer)),
        )

    def _made_by(self, module: nn.Module, name: str, part: Any) -> None:
        def before_call(module: nn.Module, arguments: Any, options: Any) -> tuple[Any, Any] | None:
            return self._watch(module, arguments, options)  # a function, which a copy of the module shares

        if module not in self._made and not isinstance(module, torch.jit.ScriptModule):
            self._made.add(module)
            self.add(module.register_forward_pre_hook(before_call, with_kwargs=True))

    def _before_any_call(self, module: nn.Module, arguments: Any) -> Any:
        if torch.compiler.is_compiling() or module in self._made:
            return None
        taken = self._watch(module, arguments, None)
        return None if taken is None else taken[0]

    def _watch(self, module: nn.Module, arguments: Any, options: Any) -> tuple[Any, Any] | None:
        """Watch a model that is new, and return the arguments to call it with; None for its own."""
        known = self._collector.known
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or module in known:
            return None
        if any(part in known for part in module.modules()):  # a wrapper of a trainer's model, as of DDP
            known.add(module)
            return None
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return None
        if options is None and not tensors(arguments):
            raise ConfigurationError(
                f"{type(module).__name__} was made before the context, and is first called without a positional tensor",
                why="torch's hooks on all modules do not show keyword arguments",
                remedy="make the model within the context, or give model= and optimizer=",
            )
        watched = self._collector.watch(module)
        if watched.model is not module and not watched.compiled:
            return None  # a wrapper, which calls the model next
        name = None if watched.compiled else watched.full()
        return self._collector.enter(watched, module, name, (arguments, options or {}))  # its own hooks, from now on


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks: of its process group, else as a launcher says and 1."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    launch = read_launch()  # the group may be formed in the context, and a replay reads its rank's recording before
    return (0 if launch is None else launch.rank), 1


def _checked(given: Any, kind: type, name: str) -> list[Any]:
    listed = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    if strange := [each for each in listed if not isinstance(each, kind)]:
        raise ConfigurationError(
            f"{name}={strange[0]!r} is not {kind.__module__}.{kind.__qualname__}",
            remedy=f"give the {name}, or remove it",
        )
    return listed

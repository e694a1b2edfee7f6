"""Collect the events of each step by hooks on modules, parameters and optimizers.

The hooks change no number, and never read a value on the host. No full backward hook is used, because it changes the
order in which gradients are added up. While a compiler traces, a hook does nothing, so that the compiled code is the
same; the modules inside are then not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any
from weakref import ReferenceType, WeakSet, ref
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.optim.shards import to_local
from accelcore.parity.events import Samples, SeenStep
from accelcore.parity.operators import Operators
from accelcore.torch_internals import after_backward, in_backward, in_transform, is_fake_mode_active, uncompiled
from accelcore.training.observers import Hooks
from accelcore.util.containers import tensors


@dataclass(eq=False)
class Watched:
    """A model that is watched, and its number among them."""

    model: nn.Module
    number: int
    compiled: bool  # whether it is called through a compiler, so that its modules are not seen
    autocast: str = "off"  # the dtype of torch's autocast around its first call
    entered: int = 0  # the step in which it was last called
    calls: int = 0  # how often it was called in that step
    outermost: nn.Module | None = None  # the module of it that is running and was called by none of it

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))

    def full(self, name: str = "") -> str:
        """Return the name of a module, a parameter or a buffer; it begins with `model2.` in the second model."""
        return f"model{self.number + 1}.{name}".rstrip(".") if self.number else name


class Collector:
    """Collects events. The owner calls `watch` for each model and `end_step` after each update.

    Args:
        operators: the steps in which operators are recorded, too; `checks` compares them with the host's in float64.
        begin: called before the first forward pass of each model in a step, and whether it is the model's first.
        receive: called with the arguments of each forward pass, a tuple and a dict; returns those to use instead.
    """

    def __init__(
        self,
        operators: Sequence[int],
        begin: Callable[[Watched, bool], None],
        receive: Callable[[Watched, tuple[Any, Any]], tuple[Any, Any]],
        *,
        checks: bool,
    ) -> None:
        self._begin, self._receive = begin, receive
        self.models: list[Watched] = []
        self.optimizers: list[Optimizer] = []
        self.step = 1
        self.is_done = False  # set to open no further step. Hooks stay until `close`: one of them may be running.
        self.operators = Operators(self._saw_operator, checks=checks)
        self._steps_of_operators = frozenset(operators)
        self._hooks = Hooks()
        self.known: WeakSet[nn.Module] = WeakSet()  # the modules of the models that are watched
        self._names: dict[int, tuple[str, str]] = {}  # module and name of each parameter, by id
        self._samples = Samples(self.operators.pause)
        self._in_job = False
        self._last: Callable[[], SeenStep] | None = None
        # Each state of an optimizer at the end of its update, by id: the tensor and its version.
        self._states: dict[int, tuple[ReferenceType[Tensor], int]] = {}
        self._clear()

    def _clear(self) -> None:
        self._is_open = False
        self._flushes_after_backward = False
        # The tensors that were seen, by id: the tensor, its version, and the module that made it.
        self._made: dict[int, tuple[ReferenceType[Tensor], int, str]] = {}
        self._updated: list[tuple[str, str, Tensor]] = []  # parameters whose optimizers have made their steps
        self._users: dict[str, str] = {}  # for each module, the module that uses its output

    def close(self) -> None:
        """Remove all hooks."""
        self.operators.stop(quietly=True)
        self._hooks.close()
        self.is_done = True

    def watch(self, called: nn.Module, inner: nn.Module | None = None) -> Watched:
        """Register hooks on a model and its parameters.

        Args:
            called: the module that the loop calls: the model, or one that compiles or replicates it.
            inner: the model itself, if that cannot be seen from `called`.
        """
        compiled = uncompiled(called) is not called
        if inner is None:
            inner = uncompiled(called)
            inner = inner.module if isinstance(inner, nn.parallel.DistributedDataParallel) else inner
        watched = Watched(inner, len(self.models), compiled)
        self.models.append(watched)
        self.known.update((*inner.modules(), *called.modules()))
        if compiled:
            self._watch_calls(watched, called, None)
        for name, module in inner.named_modules():
            full = watched.full(name)
            self._watch_calls(watched, module, full)
            for item, parameter in module.named_parameters(recurse=False):
                self._names.setdefault(id(parameter), (full, item))
                if parameter.requires_grad and parameter.is_leaf:
                    seen = partial(self._accumulated, full, item)
                    self._hooks.add(parameter.register_post_accumulate_grad_hook(seen))
        return watched

    def _watch_calls(self, watched: Watched, called: nn.Module, name: str | None) -> None:
        """Register hooks on a module; `name` is None for one that compiles the model."""

        def before(module: nn.Module, arguments: Any, options: Any) -> tuple[Any, Any] | None:
            return None if torch.compiler.is_compiling() else self.enter(watched, module, name, (arguments, options))

        def after(module: nn.Module, arguments: Any, output: Any) -> None:
            if not torch.compiler.is_compiling():
                self._leave(watched, module, name, output)

        self._hooks.add(
            called.register_forward_pre_hook(before, with_kwargs=True),
            called.register_forward_hook(after, always_call=True),
        )

    def watch_optimizer(self, optimizer: Optimizer, end_step: Callable[[], None] | None) -> None:
        """Register hooks on an optimizer; `end_step` is called after each of its steps."""
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
            self._hooks.add(
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(lambda optimizer, *_: self.after_update(optimizer, end_step)),
            )

    def enter(
        self, watched: Watched, module: nn.Module, name: str | None, own: tuple[Any, Any]
    ) -> tuple[Any, Any] | None:
        """Look at the arguments of a module, and return others for it; None for its own.

        The batch is what the outermost module gets: the model, or a part of it that a script calls by itself.
        """
        if _is_quiet():
            return None
        given = own
        if watched.outermost is None and not self.is_done:
            watched.outermost = module
            given = self._open(watched, own)
        if self._is_open and name is not None:
            self.operators.enter(name)
            parent = name.rpartition(".")[0]
            for number, tensor in enumerate(tensors(given)):
                maker = self._maker(tensor)
                if maker is None:
                    self._samples.add("input", name, str(number), tensor, parent)
                    self._mark(tensor, parent)
                elif maker:
                    self._users[maker] = name
        return None if given is own else given

    @torch.no_grad()
    def _open(self, watched: Watched, own: tuple[Any, Any]) -> tuple[Any, Any]:
        """Open a step before the first forward pass of a model in it, and look at its weights and at the batch."""
        if not self._is_open:
            self._is_open = True
            if self.step in self._steps_of_operators and not watched.compiled:
                self.operators.start(self.step)
        self._flushes_after_backward = False  # also if the last backward pass has raised
        self._in_job = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        with self.operators.pause:
            if watched.entered < self.step:
                self._open_model(watched)
            given = self._receive(watched, own)
        watched.calls += 1
        for number, tensor in enumerate(tensors(given)):
            self._samples.add("batch", watched.full(), str(number), tensor)
            if self._maker(tensor) is None:
                self._mark(tensor, "")
        self._samples.flush()
        return given

    def _open_model(self, watched: Watched) -> None:
        first, watched.entered, watched.calls = watched.entered == 0, self.step, 0
        model, device = watched.model, watched.device
        if first and device.type != "meta" and torch.is_autocast_enabled(device.type):
            watched.autocast = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
        self._begin(watched, first)
        generators = {"host generator": torch.get_rng_state()}
        if device.type not in ("cpu", "meta"):
            state = torch.get_device_module(device).get_rng_state(device)
            # The number of bytes is in the name, because an emulation has another kind of generator.
            generators[f"{device.type} generator of {len(state)} bytes"] = state
        for name, state in generators.items():
            self._samples.add("random", "", name, torch.tensor([crc32(state.numpy().tobytes())], device="cpu"))
        self._saw_all("weight", _named(watched, (*model.named_parameters(), *model.named_buffers())))

    def _leave(self, watched: Watched, module: nn.Module, name: str | None, output: Any) -> None:
        if watched.outermost is module:
            watched.outermost = None
        if name is None or not self._is_open or _is_quiet():
            return
        self.operators.leave(name)
        for number, tensor in enumerate(tensors(output)):
            if self._maker(tensor) is not None:
                continue  # a container returns what its last module returned
            self._samples.add("output", name, str(number), tensor)
            self._mark(tensor, name)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._saw_gradient, name, str(number)))

    def _maker(self, tensor: Tensor) -> str | None:
        """Return the module that made a tensor, empty for a batch; None if the tensor was not seen as it is now."""
        made = self._made.get(id(tensor))
        return None if made is None or made[0]() is not tensor or made[1] != tensor._version else made[2]

    def _mark(self, tensor: Tensor, module: str) -> None:
        self._made[id(tensor)] = (ref(tensor), tensor._version, module)

    def see(self, kind: str, item: str, tensor: Tensor) -> None:
        """Add an event that belongs to no module, such as the loss."""
        if self._is_open and not torch.compiler.is_compiling() and not _is_quiet():
            self._samples.add(kind, "", item, tensor)

    def _before_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> tuple[Any, Any] | None:
        """Look at what an optimizer is about to use: now, or after the closure that computes it, as in Lightning."""
        closure = options.get("closure") or next(iter(arguments[1:]), None)
        if not callable(closure):
            self.before_update(optimizer)
            return None
        calls = count()

        def seen_closure() -> Any:
            loss = closure()
            if not next(calls):  # LBFGS calls it several times
                self.before_update(optimizer)
            return loss

        by_name = "closure" in options
        given = arguments if by_name else (optimizer, seen_closure, *arguments[2:])
        return given, {**options, "closure": seen_closure} if by_name else options

    def before_update(self, optimizer: Optimizer) -> None:
        """Look at the gradients and the state that an optimizer is about to use."""
        self.operators.stop()
        if torch.compiler.is_compiling() or self.is_done:
            return
        held = self._parameters_of(optimizer)
        if not self._is_open:  # the step of the forward pass ended with another optimizer's
            if self.step == 1:
                return
            self._is_open = True
            self._saw_all("weight", held)
        gradients = [(module, item, each.grad) for module, item, each in held if each.grad is not None]
        self._saw_all("reduced", gradients)
        number = self.optimizers.index(optimizer)
        groups = [(f"of optimizer {number} group {n}", group) for n, group in enumerate(optimizer.param_groups)]
        self._saw_all(
            "learning rate", [("", name, _rate(group)) for name, group in groups if group.get("lr") is not None]
        )
        if self.step > 1:  # in the first step, an optimizer of ours would make its state when it is asked for
            state = _state_of(optimizer, held)
            self._saw_all("old state", [each for each in state if not self._is_as_before(each[2])])

    def after_update(self, optimizer: Optimizer, end_step: Callable[[], None] | None) -> None:
        """Look at the state of an optimizer after its step."""
        if not self._is_open or torch.compiler.is_compiling():
            return
        held = self._parameters_of(optimizer)
        state = _state_of(optimizer, held)
        self._saw_all("state", state)
        self._states |= {id(each): (ref(each), to_local(each)._version) for *_, each in state}
        self._updated += held
        if end_step is not None:
            end_step()

    def end_step(self) -> SeenStep | None:
        """End a step. Return the step before it, whose samples have arrived; None after the first."""
        self.operators.stop()
        if not self._is_open:
            return None
        self._saw_all("parameter", self._updated)  # now: a trainer has copied its fp32 masters to them
        for watched in self.models:
            self._saw_all("buffer", _named(watched, watched.model.named_buffers()))
        finished = self.last()
        self._last = self._samples.end(self.step)
        self._clear()
        self.step += 1
        return finished

    def last(self) -> SeenStep | None:
        """Return the last step that ended, if it was not returned yet."""
        last, self._last = self._last, None
        return None if last is None else last()

    def _saw_gradient(self, name: str, item: str, gradient: Tensor) -> None:
        if self._is_open and not torch.compiler.is_compiling():
            self._flush_after_backward()
            self._samples.add("grad", name, item, gradient, self._users.get(name, name.rpartition(".")[0]))

    def _accumulated(self, name: str, item: str, parameter: Tensor) -> None:
        if self._is_open and not torch.compiler.is_compiling() and parameter.grad is not None:
            self._flush_after_backward()
            # In a job, ranks may exchange gradients while the backward pass goes on.
            self._samples.add("gradient", name, item, parameter.grad, at_once=self._in_job)

    def _flush_after_backward(self) -> None:
        """Let gradients wait no longer than to the end of this backward pass: the script may change them."""
        if not self._flushes_after_backward:
            self._flushes_after_backward = True
            after_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._flushes_after_backward = False
        self._samples.flush()

    def _is_as_before(self, state: Tensor) -> bool:
        """Return whether nothing has changed a tensor of an optimizer's state since the end of its last update."""
        seen = self._states.get(id(state))
        return seen is not None and seen[0]() is state and seen[1] == to_local(state)._version

    def _parameters_of(self, optimizer: Optimizer) -> list[tuple[str, str, Tensor]]:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [(*self._names.get(id(each), ("", f"(parameter {number})")), each) for number, each in enumerate(held)]

    def _saw_operator(self, name: str, module: str, backward: bool, results: list[Tensor]) -> None:
        for number, tensor in enumerate(results):
            kind = "operator of backward" if backward else "operator"
            self._samples.add(kind, module, f"{name} {number}", tensor, at_once=True)

    def _saw_all(self, kind: str, seen: Iterable[tuple[str, str, Tensor]]) -> None:
        for module, item, tensor in seen:
            self._samples.add(kind, module, item, tensor)
        self._samples.flush()


def _is_quiet() -> bool:
    """Return whether nothing is to be seen now: an evaluation, a recomputation, a trace, or a transform."""
    return not torch.is_grad_enabled() or in_backward() or is_fake_mode_active() or in_transform()


def _named(watched: Watched, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield parameters or buffers of a model with the module and the name of each."""
    for name, tensor in named:
        module, _, item = watched.full(name).rpartition(".")
        yield module, item, tensor


def _rate(group: dict[str, Any]) -> Tensor:
    """Return a group's learning rate, and beside it the one that its schedule began from, which shows its scale."""
    rate = group["lr"]
    device = rate.device if isinstance(rate, Tensor) else "cpu"
    both = (rate, group.get("initial_lr", rate))
    return torch.stack([torch.as_tensor(each, dtype=torch.float32, device=device).reshape(()) for each in both])


def _state_of(optimizer: Optimizer, held: Iterable[tuple[str, str, Tensor]]) -> list[tuple[str, str, Tensor]]:
    """Return the tensors of an optimizer's state, each with the module of its parameter and its name."""
    states = optimizer.state
    return [
        (module, f"{key} of {item}", value)
        for module, item, parameter in held
        for key, value in states.get(parameter, {}).items()
        if isinstance(value, Tensor)
    ]

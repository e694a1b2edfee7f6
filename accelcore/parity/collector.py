"""Collect the events of each step by hooks on modules, parameters and optimizers.

The hooks change no number. They read with `no_grad`, keep no tensor of the model alive, and never read a value on the
host. No full backward hook is used, because it changes the order in which gradients are added up. While a compiler
traces, a hook does nothing, so that the compiled code is the same; the modules inside are then not seen.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.optim.shards import to_local
from accelcore.parity.events import Event, Row, Step, elements
from accelcore.parity.operators import Operators
from accelcore.roles.runtime import fetch
from accelcore.torch_internals import forward_number, in_backward, is_fake_mode_active, uncompiled
from accelcore.training.observers import Hooks
from accelcore.util.containers import tensors

__all__ = ["Collector", "Watched"]


@dataclass
class Watched:
    """A model that is watched.

    Attributes:
        prefix: before the names of its modules: empty for the first model, `"model2."` for the second.
        compiled: whether it is called through a compiler, so that its modules are not seen.
        autocast: the dtype of torch's autocast around its first call, or `"off"`.
    """

    model: nn.Module
    prefix: str
    compiled: bool
    autocast: str = "off"
    entered: int = 0  # the step in which it was last called
    calls: int = 0  # in this step
    outermost: nn.Module | None = None  # the module of it that is running and was called by none of it
    names: dict[int, tuple[str, str]] = field(default_factory=dict)  # module and name of each parameter, by id


class Collector:
    """Collects events. The owner calls `watch` for each model and `end_step` after each update.

    Attributes:
        is_done: set it to open no further step. The hooks stay until `close`, because one of them may be running.

    Args:
        operators: the steps in which operators are recorded, too.
        begin: called before the first forward pass of each model in a step, and whether it is the model's first.
        receive: called with the arguments of each forward pass, a tuple and a dict; returns those to use instead.
        checks: whether operators are compared with the host's in float64 in these steps.
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
        self.step = 1
        self.is_done = False
        self.operators = Operators(self._saw_operator, checks=checks)
        self._steps_of_operators = frozenset(operators)
        self._hooks = Hooks()
        self._known: dict[int, ReferenceType[nn.Module]] = {}
        self._of_optimizers: dict[int, ReferenceType[Optimizer]] = {}
        self._last: Callable[[], Step] | None = None
        # Each state of an optimizer at the end of its update, by id: the tensor and its version.
        self._states: dict[int, tuple[ReferenceType[Tensor], int]] = {}
        self._clear()
        self._is_open = False

    def _clear(self) -> None:
        self._rows: list[Row] = []
        self._samples: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._numbers: Counter[tuple[str, str, str]] = Counter()
        # The tensors that were seen, by id: the tensor, its version, and the module that made it.
        self._made: dict[int, tuple[ReferenceType[Tensor], int, str]] = {}
        self._users: dict[str, str] = {}  # for each module, the module that uses its output

    def close(self) -> None:
        """Remove all hooks."""
        self.operators.stop(quietly=True)
        self._hooks.close()
        self.is_done = True

    def knows(self, module: nn.Module) -> bool:
        """Return whether a module belongs to a model that is watched."""
        found = self._known.get(id(module))
        return found is not None and found() is module

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
        prefix = f"model{len(self.models) + 1}." if self.models else ""
        watched = Watched(inner, prefix, compiled)
        self.models.append(watched)
        for module in (*inner.modules(), *called.modules()):
            self._known[id(module)] = ref(module)
        if compiled:
            self._hooks.add(
                called.register_forward_pre_hook(self._opening(watched), with_kwargs=True),
                called.register_forward_hook(self._closing(watched), always_call=True),
            )
        for name, module in inner.named_modules():
            full = (prefix + name).rstrip(".")
            self._hooks.add(
                module.register_forward_pre_hook(self._opening(watched), with_kwargs=True),
                module.register_forward_pre_hook(self._entering(full), with_kwargs=True),
                module.register_forward_hook(self._leaving(full)),
                module.register_forward_hook(self._closing(watched), always_call=True),
            )
            for item, parameter in module.named_parameters(recurse=False):
                watched.names.setdefault(id(parameter), (full, item))
                if parameter.requires_grad and parameter.is_leaf:
                    seen = self._accumulated(full, item)
                    self._hooks.add(parameter.register_post_accumulate_grad_hook(seen))
        return watched

    def watch_optimizer(self, optimizer: Optimizer, end_step: Callable[[], None] | None) -> None:
        """Register hooks on an optimizer; `end_step` is called after each of its steps."""
        if id(optimizer) in self._of_optimizers:
            return
        self._of_optimizers[id(optimizer)] = ref(optimizer)
        self._hooks.add(
            optimizer.register_step_pre_hook(lambda optimizer, *_: self.before_update(optimizer)),
            optimizer.register_step_post_hook(lambda optimizer, *_: self.after_update(optimizer, end_step)),
        )

    def enter(self, watched: Watched, module: nn.Module, arguments: Any, options: Any) -> tuple[Any, Any] | None:
        """Open a step before the first forward pass of a model in it; look at its weights and at the batch.

        The batch is what the outermost module gets: the model, or a part of it that a script calls by itself. Return
        other arguments for it, or None for its own.
        """
        if self.is_done or watched.outermost is not None or self._is_quiet():
            return None
        own = (arguments, options)
        watched.outermost = module
        if not self._is_open:
            self._is_open = True
            if self.step in self._steps_of_operators and not watched.compiled:
                self.operators.start(self.step)
        with self.operators.paused(), torch.no_grad():
            if watched.entered < self.step:
                first, watched.entered, watched.calls = watched.entered == 0, self.step, 0
                if first:
                    watched.autocast = _autocast(_device_of(watched.model))
                self._begin(watched, first)
                for name, state in _generators(watched.model):
                    self._saw("random", "", name, _digest(state))
                named = (*watched.model.named_parameters(), *watched.model.named_buffers())
                self._saw_all("weight", [(*_split(watched.prefix + name), tensor) for name, tensor in named])
            given = self._receive(watched, own)
            watched.calls += 1
            for number, tensor in enumerate(tensors(given)):
                self._saw("batch", watched.prefix.rstrip("."), str(number), tensor)
                self._made.setdefault(id(tensor), (ref(tensor), tensor._version, ""))
        return None if given is own else given

    def see(self, kind: str, item: str, tensor: Tensor) -> None:
        """Add an event that belongs to no module, such as the loss."""
        if self._is_open and not self._is_quiet():
            self._saw(kind, "", item, tensor)

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
        if self.step > 1:  # in the first step, an optimizer of ours would make its state when it is asked for
            state = self._state_of(optimizer)
            self._saw_all("old state", [each for each in state if not self._is_as_before(each[2])])

    def after_update(self, optimizer: Optimizer, end_step: Callable[[], None] | None) -> None:
        """Look at the state of an optimizer and the parameters after its step."""
        if not self._is_open or torch.compiler.is_compiling():
            return
        state = self._state_of(optimizer)
        self._saw_all("state", state)
        self._states |= {id(each): (ref(each), to_local(each)._version) for *_, each in state}
        self._saw_all("parameter", self._parameters_of(optimizer))
        if end_step is not None:
            end_step()

    def end_step(self) -> Step | None:
        """End a step. Return the step before it, whose samples have arrived; None after the first."""
        self.operators.stop()
        if not self._is_open:
            return None
        for watched in self.models:
            buffers = watched.model.named_buffers()
            self._saw_all("buffer", [(*_split(watched.prefix + name), buffer) for name, buffer in buffers])
        finished = self.last()
        self._last = self._begin_to_read()
        self._clear()
        self._is_open = False
        self.step += 1
        return finished

    def last(self) -> Step | None:
        """Return the last step that ended, if it was not returned yet."""
        last, self._last = self._last, None
        return None if last is None else last()

    def _begin_to_read(self) -> Callable[[], Step]:
        """Join the samples of a step, and begin to copy them: one copy for each dtype and device."""
        number, rows = self.step, self._rows
        arriving = {key: fetch(torch.cat(samples)) for key, samples in self._samples.items()}
        return lambda: Step(number, rows, {key: ready() for key, ready in arriving.items()})

    def _is_quiet(self) -> bool:
        """Return whether nothing is to be seen now: an evaluation, a recomputation, or a trace of a compiler."""
        return torch.compiler.is_compiling() or not torch.is_grad_enabled() or in_backward() or is_fake_mode_active()

    def _opening(self, watched: Watched) -> Callable[..., tuple[Any, Any] | None]:
        def before_forward(module: nn.Module, arguments: Any, options: Any) -> tuple[Any, Any] | None:
            if torch.compiler.is_compiling():
                return None
            return self.enter(watched, module, arguments, options)

        return before_forward

    def _closing(self, watched: Watched) -> Callable[..., None]:
        def after_forward(module: nn.Module, arguments: Any, output: Any) -> None:
            if not torch.compiler.is_compiling() and watched.outermost is module:
                watched.outermost = None

        return after_forward

    def _entering(self, name: str) -> Callable[..., None]:
        def before_forward(module: nn.Module, arguments: Any, options: Any) -> None:
            if torch.compiler.is_compiling():
                return
            if self._is_open and not self._is_quiet():
                self.operators.enter(name, forward_number())
                parent = name.rpartition(".")[0]
                for number, tensor in enumerate(tensors([arguments, options])):
                    made = self._made.get(id(tensor))
                    if made is None or made[0]() is not tensor or made[1] != tensor._version:
                        self._saw("input", name, str(number), tensor, source=parent)
                        self._made[id(tensor)] = (ref(tensor), tensor._version, parent)
                    elif made[2]:
                        self._users[made[2]] = name

        return before_forward

    def _leaving(self, name: str) -> Callable[..., None]:
        def after_forward(module: nn.Module, arguments: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            if self._is_open and not self._is_quiet():
                self.operators.leave(name, forward_number())
                for number, tensor in enumerate(tensors(output)):
                    made = self._made.get(id(tensor))
                    if made is not None and made[0]() is tensor and made[1] == tensor._version:
                        continue  # a container returns what its last module returned
                    self._saw("output", name, str(number), tensor)
                    self._made[id(tensor)] = (ref(tensor), tensor._version, name)
                    if tensor.requires_grad:
                        tensor.register_hook(self._gradient_of(name, str(number)))  # type: ignore[no-untyped-call]

        return after_forward

    def _gradient_of(self, name: str, item: str) -> Callable[[Tensor], None]:
        def seen(gradient: Tensor) -> None:
            if self._is_open and not torch.compiler.is_compiling():
                self._saw("grad", name, item, gradient, source=self._users.get(name, name.rpartition(".")[0]))

        return seen

    def _accumulated(self, name: str, item: str) -> Callable[[Tensor], None]:
        def seen(parameter: Tensor) -> None:
            if self._is_open and not torch.compiler.is_compiling() and parameter.grad is not None:
                self._saw("gradient", name, item, parameter.grad)

        return seen

    def _state_of(self, optimizer: Optimizer) -> list[tuple[str, str, Tensor]]:
        states = optimizer.state
        return [
            (module, f"{key} of {item}", value)
            for module, item, parameter in self._parameters_of(optimizer)
            for key, value in states.get(parameter, {}).items()
            if isinstance(value, Tensor)
        ]

    def _is_as_before(self, state: Tensor) -> bool:
        """Return whether nothing has changed a tensor of an optimizer's state since the end of its last update."""
        seen = self._states.get(id(state))
        return seen is not None and seen[0]() is state and seen[1] == to_local(state)._version

    def _parameters_of(self, optimizer: Optimizer) -> list[tuple[str, str, Tensor]]:
        names = {key: name for watched in self.models for key, name in watched.names.items()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [(*names.get(id(each), ("", f"(parameter {number})")), each) for number, each in enumerate(held)]

    def _saw_operator(self, name: str, module: str, backward: bool, results: Any) -> None:
        for number, tensor in enumerate(tensors(results)):
            self._saw("operator of backward" if backward else "operator", module, f"{name} {number}", tensor)

    def _saw(self, kind: str, module: str, item: str, tensor: Tensor, *, source: str = "") -> None:
        self._saw_all(kind, [(module, item, tensor)], source=source)

    def _saw_all(self, kind: str, seen: Iterable[tuple[str, str, Tensor]], *, source: str = "") -> None:
        """Take samples of tensors, each with its module and item."""
        taken = defaultdict[str, list[Tensor]](list)
        with self.operators.paused(), torch.no_grad():
            for module, item, tensor in seen:
                local = to_local(tensor)
                sample = elements(local)
                event = Event(kind, module, item, self._numbers[kind, module, item])
                key = _key(sample.dtype, sample.device)
                self._numbers[kind, module, item] += 1
                self._rows.append(Row(event, key, tuple(local.shape), source, sample.numel()))
                taken[key].append(sample)
            for key, samples in taken.items():
                self._samples[key].append(torch.cat(samples))


def _split(name: str) -> tuple[str, str]:
    """Return a module's name, and the name of a parameter or buffer of it."""
    module, _, item = name.rpartition(".")
    return module, item


@lru_cache
def _key(dtype: torch.dtype, device: torch.device) -> str:
    return f"{dtype}.{device}".removeprefix("torch.")


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _autocast(device: torch.device) -> str:
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return "off"
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")


def _generators(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the states of the generators of the host and of a model's device, which both keep them on the host."""
    yield "host generator", torch.get_rng_state()
    device = _device_of(model)
    if device.type not in ("cpu", "meta"):
        module: Any = torch.get_device_module(device)
        state = module.get_rng_state(device)
        yield f"{device.type} generator of {len(state)} bytes", state  # an emulation has another kind of generator


def _digest(state: Tensor) -> Tensor:
    """Return a number for the state of a generator."""
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=7).digest()
    return torch.tensor([int.from_bytes(digest, "big")])

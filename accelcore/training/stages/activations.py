"""Activation checkpointing and offloading of parts of a model, by torch's `checkpoint` and by `Offload`."""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from accelcore.errors import ConfigurationError, TrainingError, UnsupportedError
from accelcore.training.observers import Hooks
from accelcore.training.options import Recompute, chosen
from accelcore.training.plan import Plan, Stage


class ActivationStorage:
    """Storage of a module's activations between forward and backward: they are recomputed or offloaded.

    `save`: operators whose results are kept in any case. `offload`: None if tensors stay on the device.
    """

    def __init__(self, device: torch.device, *, recompute: bool, save: Sequence[Any], offload: Offload | None) -> None:
        self._recompute, self._offload = recompute, offload
        # checkpoint finds the device whose random state it restores by its positional arguments.
        self._anchor = torch.empty(0, device=device)
        self._save = list(save)

    def install(self, module: nn.Module) -> None:
        """Apply this to a module. As with `fully_shard`, its class is replaced by a subclass."""
        if not isinstance(module, _Stored):
            module.__class__ = _class_with_storage(type(module))  # type: ignore[arg-type]  # mypy takes type for unhashable
        module.__dict__[_STORAGE] = self

    def remove(self, module: nn.Module) -> None:
        """Undo `install`, unless another storage has been installed since."""
        if module.__dict__.get(_STORAGE) is self:
            del module.__dict__[_STORAGE]
            if type(module).__dict__.get(_MADE_FROM) is not None:
                module.__class__ = type(module).__dict__[_MADE_FROM]

    def __call__(self, module: nn.Module, forward: Callable[..., Any], args: Any, named: dict[str, Any]) -> Any:
        with nullcontext() if self._offload is None else self._offload.of(module):
            if not self._recompute:
                return forward(*args, **named)

            def computed(anchor: Tensor, *args: Any, **named: Any) -> Any:
                return forward(*args, **named)

            contexts = partial(self._contexts, module)
            return checkpoint(computed, self._anchor, *args, use_reentrant=False, context_fn=contexts, **named)

    def compiled(self, forward: Callable[..., Any], args: Any, named: dict[str, Any]) -> Any:
        """Call a module's `forward` while a compiler traces it; it handles random numbers and buffers itself."""
        if not self._recompute:
            return forward(*args, **named)
        if not self._save:
            return checkpoint(forward, *args, use_reentrant=False, **named)
        contexts = partial(create_selective_checkpoint_contexts, self._save)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **named)

    def _contexts(self, module: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if not self._save:
            return nullcontext(), _unchanged(module, nullcontext())
        first, again = create_selective_checkpoint_contexts(self._save)
        return first, _unchanged(module, again)


_STORAGE, _MADE_FROM = "_accelcore_storage", "_accelcore_made_from"


class _Stored(nn.Module):
    """Base class put before a module's class, so that `forward` goes through its storage."""

    def forward(self, *args: Any, **named: Any) -> Any:
        storage = self.__dict__.get(_STORAGE)
        if storage is None or not torch.is_grad_enabled():
            return super().forward(*args, **named)
        if torch.compiler.is_compiling():
            return storage.compiled(super().forward, args, named)
        return storage(self, super().forward, args, named)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy the module with its own class."""
        own = getattr(self, "__getstate__", None)
        state = dict(self.__dict__ if own is None else own())
        state.pop(_STORAGE, None)
        return copyreg._reconstructor, (getattr(type(self), _MADE_FROM), object, None), state  # type: ignore[attr-defined]


@cache
def _class_with_storage(base: type[nn.Module]) -> type[nn.Module]:
    return type(base.__name__, (_Stored, base), {"__module__": base.__module__, _MADE_FROM: base})


@contextmanager
def _unchanged(module: nn.Module, inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter `inner`, and afterwards restore buffers, such as running statistics."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with inner:
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


class Offload:
    """Copies saved tensors to pinned memory of the host on a stream of its own, and back before backward needs them.

    The copies run beside other work; torch's `save_on_cpu` copies each tensor while the host and the device wait. When
    backward reaches a module, the tensors of this module and of the module that ran before it are being copied back.
    The device then holds the tensors of two modules.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: Any = torch.get_device_module(device)
        self._stream: Any = self._streams.Stream(device)
        self._latest: weakref.ref[_Call] | None = None

    def of(self, module: nn.Module) -> saved_tensors_hooks:
        """Return a context for a module's forward pass. Its parameters stay: they take no additional memory."""
        held = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        call = _Call(self._latest)
        self._latest = weakref.ref(call)

        def pack(tensor: Tensor) -> Any:
            stays = tensor.device != self._device or tensor.untyped_storage().data_ptr() in held
            return tensor if stays else self._send(tensor, call)

        def unpack(packed: Any) -> Tensor:
            return self._receive(packed) if isinstance(packed, _Offloaded) else packed

        return saved_tensors_hooks(pack, unpack)

    def _send(self, tensor: Tensor, call: _Call) -> _Offloaded:
        self._stream.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._stream):
            copy = tensor.detach().to("cpu", non_blocking=True, copy=True)
        tensor.record_stream(self._stream)
        return _Offloaded(tensor, copy, call)

    def _receive(self, offloaded: _Offloaded) -> Tensor:
        if offloaded.changed:
            raise TrainingError(
                f"a tensor of shape {tuple(offloaded.copy.shape)} was changed in place after it was saved for backward",
                why="offload= copies it while other work runs: the copy may have the old or the new value",
                remedy="replace the in-place operation, or leave this part of the model out of offload=",
            )
        if not offloaded.call.returns:
            self._return_all(offloaded.call)
        earlier = None if offloaded.call.earlier is None else offloaded.call.earlier()
        user = self._streams.current_stream(self._device)
        tensor, arrived = offloaded.take() or self._return(offloaded)
        user.wait_event(arrived)
        tensor.record_stream(user)
        if earlier is not None and not earlier.returns:
            self._return_all(earlier)
        return tensor

    def _return_all(self, call: _Call) -> None:
        call.returns = True
        for reference in reversed(call.offloaded):  # backward needs the last one first
            if (offloaded := reference()) is not None:
                offloaded.back = self._return(offloaded)

    def _return(self, offloaded: _Offloaded) -> tuple[Tensor, Any]:
        """Begin the copy to the device. It follows the copy to the host, on the same stream."""
        with self._streams.stream(self._stream):
            tensor = offloaded.copy.to(self._device, non_blocking=True)
            return tensor, self._stream.record_event()


class _Call:
    """One forward pass of a module. It holds no tensors: autograd does, until it frees the graph."""

    def __init__(self, earlier: weakref.ref[_Call] | None) -> None:
        self.earlier = earlier
        self.offloaded: list[weakref.ref[_Offloaded]] = []
        self.returns = False


class _Offloaded:
    """A saved tensor on the host, and on the device again as soon as its copy back begins."""

    def __init__(self, tensor: Tensor, copy: Tensor, call: _Call) -> None:
        self.copy, self.call = copy, call
        self.back: tuple[Tensor, Any] | None = None
        # It shares the count of changes in place with the saved tensor, and has no memory.
        self._twin = tensor.detach()
        self._twin.data = tensor.new_empty(0)
        self._version = self._twin._version
        call.offloaded.append(weakref.ref(self))

    @property
    def changed(self) -> bool:
        return self._twin._version != self._version

    def take(self) -> tuple[Tensor, Any] | None:
        """Return the copy on the device and drop it, so that its memory is free after its use."""
        back, self.back = self.back, None
        return back


class ActivationCheckpointing(Stage):
    """Recomputes or offloads the activations of chosen modules, until the trainer is gone."""

    def __init__(self) -> None:
        self._hooks = Hooks()

    def check(self, plan: Plan) -> None:
        _chosen_parts(plan)
        options: Mapping[str, Any] = plan.options
        for option, other, why in (
            ("checkpoint", "graph", "a graph cannot restore a random state"),
            ("offload", "graph", "a graph cannot wait for the copies"),
            ("offload", "compile", "a compiler decides by itself what to save for backward"),
        ):
            if options[option] is not None and options[other] is not False:
                raise ConfigurationError(
                    f"{option}= and {other}=True cannot be combined", why=why, remedy="leave one of the two out"
                )
        able = plan.backend.capabilities
        if plan.options["offload"] is not None and not (able.streams and able.pinned_memory):
            raise UnsupportedError(
                f"offload= is not available on {plan.backend.name}",
                why="the backend does not declare streams and pinned memory",
                remedy="remove offload; checkpoint= saves memory on every device",
            )

    def apply(self, plan: Plan) -> None:
        self._hooks.close()
        save = plan.options["checkpoint"].save if isinstance(plan.options["checkpoint"], Recompute) else ()
        device, (recomputed, offloaded) = plan.backend.device, _chosen_parts(plan)
        offload = Offload(device) if offloaded else None
        for module in dict.fromkeys((*recomputed, *offloaded)):
            storage = ActivationStorage(
                device, recompute=module in recomputed, save=save, offload=offload if module in offloaded else None
            )
            storage.install(module)
            self._hooks.callback(storage.remove, module)


def _chosen_parts(plan: Plan) -> tuple[list[nn.Module], list[nn.Module]]:
    recompute, offload = plan.options["checkpoint"], plan.options["offload"]
    parts = recompute.parts if isinstance(recompute, Recompute) else recompute
    return (
        [] if parts is None else chosen(plan.model, parts, "checkpoint"),
        [] if offload is None else chosen(plan.model, offload, "offload"),
    )

"""Activation checkpointing and offloading of parts of a model, by torch's `checkpoint` and `saved_tensors_hooks`."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.training.observers import Hooks
from accelcore.training.options import Recompute, chosen
from accelcore.training.plan import Plan, Stage


class ActivationStorage:
    """Storage of a module's activations between forward and backward: they are recomputed or offloaded.

    `save`: operators whose results are kept in any case.
    """

    def __init__(self, device: torch.device, *, recompute: bool, save: Sequence[Any], offload: bool) -> None:
        self._device, self._recompute, self._offload = device, recompute, offload
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
        with _on_host(module, self._device) if self._offload else nullcontext():
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
        first, again = create_selective_checkpoint_contexts(self._save)  # type: ignore[no-untyped-call]
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


def _on_host(module: nn.Module, device: torch.device) -> saved_tensors_hooks:
    """Return a context for a module's forward pass, whose saved tensors wait for backward in pinned host memory.

    Parameters stay: they take no additional memory. The host waits for no copy, but other work on the device does.
    """
    held = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def pack(tensor: Tensor) -> Tensor | tuple[Tensor]:
        stays = tensor.device != device or tensor.untyped_storage().data_ptr() in held
        return tensor if stays else (tensor.detach().to("cpu", non_blocking=True, copy=True),)

    def unpack(packed: Tensor | tuple[Tensor]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[0].to(device, non_blocking=True)

    return saved_tensors_hooks(pack, unpack)


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
        for module in dict.fromkeys((*recomputed, *offloaded)):
            storage = ActivationStorage(device, recompute=module in recomputed, save=save, offload=module in offloaded)
            storage.install(module)
            self._hooks.callback(storage.remove, module)


def _chosen_parts(plan: Plan) -> tuple[list[nn.Module], list[nn.Module]]:
    recompute, offload = plan.options["checkpoint"], plan.options["offload"]
    parts = recompute.parts if isinstance(recompute, Recompute) else recompute
    return (
        [] if parts is None else chosen(plan.model, parts, "checkpoint"),
        [] if offload is None else chosen(plan.model, offload, "offload"),
    )

"""What a forward pass keeps for the backward pass: less of it, or not on the device.

By torch's own means: `torch.utils.checkpoint` computes a part of the model anew in backward, and
`torch.autograd.graph.save_on_cpu` lets what is kept wait in the memory of the host.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from accelcore.errors import ConfigurationError
from accelcore.torch_internals import OpOverload
from accelcore.training.modules import Parts, check_parts

__all__ = ["Keeping", "Recompute"]


@dataclass(frozen=True)
class Recompute:
    """Activation checkpointing with a list of operators whose results are kept all the same.

    Attributes:
        parts: what is computed anew, as for `checkpoint=` in a trainer.
        save: operators that are not: `[torch.ops.aten.mm.default]` keeps the results of matrix products.

    Raises:
        ConfigurationError: `parts` chooses no modules; something in `save` is no operator.
    """

    parts: Parts
    save: Sequence[OpOverload] = ()

    def __post_init__(self) -> None:
        check_parts(self.parts, "parts")
        if strange := [each for each in self.save if not isinstance(each, OpOverload)]:
            raise ConfigurationError(
                f"save lists {strange[0]!r}, which is no operator", remedy="name overloads: torch.ops.aten.mm.default"
            )


class Keeping:
    """How the forward pass of a module keeps what its backward pass needs.

    Args:
        device: where the module is.
        recompute: whether it is computed anew, from what it was given; else all is kept.
        save: operators whose results are kept.
        offload: whether what is kept waits in pinned memory of the host.
    """

    def __init__(self, device: torch.device, *, recompute: bool, save: Sequence[Any], offload: bool) -> None:
        self._recompute, self._offload = recompute, offload
        # checkpoint looks at positional arguments to find the device whose random state it has to restore.
        self._anchor = torch.empty(0, device=device)
        self._save = list(save)

    def install(self, module: nn.Module) -> None:
        """Let a module keep it so from now on. As with `fully_shard`, its class becomes one made for that."""
        if not isinstance(module, _Keeps):
            module.__class__ = _kind(type(module))
        module.__dict__[_KEEPING] = self

    def remove(self, module: nn.Module) -> None:
        """Undo it, where nobody else has taken this one's place."""
        if module.__dict__.get(_KEEPING) is self:
            del module.__dict__[_KEEPING]
            if type(module).__dict__.get(_MADE_FROM) is not None:
                module.__class__ = type(module).__dict__[_MADE_FROM]

    def __call__(self, module: nn.Module, forward: Callable[..., Any], args: Any, named: dict[str, Any]) -> Any:
        """Call a module's `forward`."""
        with _offload(module, self._anchor.device) if self._offload else nullcontext():
            if not self._recompute:
                return forward(*args, **named)
            computed = partial(_computed, forward, tuple(named))
            contexts = partial(self._contexts, module)
            # All are positional: of others checkpoint saves none.
            return checkpoint(computed, self._anchor, *args, *named.values(), use_reentrant=False, context_fn=contexts)

    def compiled(self, forward: Callable[..., Any], args: Any, named: dict[str, Any]) -> Any:
        """The same where a compiler traces it, which takes care of random numbers and buffers itself."""
        if not self._recompute:
            return forward(*args, **named)
        if not self._save:
            return checkpoint(forward, *args, use_reentrant=False, **named)
        contexts = partial(create_selective_checkpoint_contexts, self._save)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **named)

    def _contexts(self, module: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The context of a module's forward pass, and that of computing it anew."""
        if not self._save:
            return nullcontext(), _unchanged(module, nullcontext())
        first, again = create_selective_checkpoint_contexts(self._save)  # type: ignore[no-untyped-call]
        return first, _unchanged(module, again)


_KEEPING, _MADE_FROM = "_accelcore_keeping", "_accelcore_made_from"


class _Keeps(nn.Module):
    """Put before the class of a module, whose `forward` it calls."""

    def forward(self, *args: Any, **named: Any) -> Any:
        keeping = self.__dict__.get(_KEEPING)
        if keeping is None or not torch.is_grad_enabled():
            return super().forward(*args, **named)
        if torch.compiler.is_compiling():
            return keeping.compiled(super().forward, args, named)
        return keeping(self, super().forward, args, named)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy, and what is unpickled, is of the class that the module had."""
        own = getattr(self, "__getstate__", None)
        state = dict(self.__dict__ if own is None else own())
        state.pop(_KEEPING, None)
        return copyreg._reconstructor, (getattr(type(self), _MADE_FROM), object, None), state  # type: ignore[attr-defined]


_kinds: dict[type[nn.Module], type[nn.Module]] = {}


def _kind(base: type[nn.Module]) -> type[nn.Module]:
    if base not in _kinds:
        _kinds[base] = type(base.__name__, (_Keeps, base), {"__module__": base.__module__, _MADE_FROM: base})
    return _kinds[base]


def _computed(forward: Callable[..., Any], names: tuple[str, ...], anchor: Tensor, *given: Any) -> Any:
    count = len(given) - len(names)
    return forward(*given[:count], **dict(zip(names, given[count:], strict=True)))


@contextmanager
def _unchanged(module: nn.Module, inner: AbstractContextManager[Any]) -> Iterator[None]:
    """A context around `inner` that leaves buffers, such as running statistics, as they were."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with inner:
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _offload(module: nn.Module, device: torch.device) -> AbstractContextManager[object]:
    """`save_on_cpu` of torch, but for parameters: those are there anyway."""
    inner = save_on_cpu(pin_memory=True, device_type=device.type)
    held = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def pack(tensor: Tensor) -> Any:
        stays = tensor.device != device or tensor.untyped_storage().data_ptr() in held
        return tensor if stays else inner.pack_hook(tensor)

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else inner.unpack_hook(packed)

    return saved_tensors_hooks(pack, unpack)

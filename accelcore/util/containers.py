"""Tensors in containers: dicts, lists, tuples and dataclasses of them, to any depth."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor

from accelcore.util.text import kind_of

T = TypeVar("T")

_PLAIN = (str, int, float, bool, type(None))

_CHECKED = 4096  # number of values of each tensor that a checksum takes
_SHOWN = 8  # number of parts of a container that `described` tells


def is_on(value: Any, device: torch.device) -> bool:
    """Return whether all of `value` is known to be on a device: plain tensors, lists, tuples and dicts.

    False for anything else, such as a dataclass: `moved` then looks into it. This takes a tenth of its time.
    """
    kind = type(value)
    if kind is Tensor:
        return value.device == device  # type: ignore[no-any-return]
    if kind is dict:
        value = value.values()
    elif kind is not tuple and kind is not list:
        return kind in _PLAIN
    for part in value:  # noqa: SIM110  # `all` takes twice as long
        if not is_on(part, device):
            return False
    return True


def moved(value: T, device: torch.device) -> T:
    """Return `value` with its tensors, and everything with a method `to`, on a device. Nothing there is copied."""

    def move(part: Any) -> Any:
        return part.to(device) if _moves_itself(part) else NotImplemented

    return _mapped(value, lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()), others=move)


def _moves_itself(part: Any) -> bool:
    # A dict whose attributes are its entries may raise KeyError, or have an entry of this name.
    owner = type(part) if isinstance(part, Mapping) else part
    return not isinstance(part, type) and callable(getattr(owner, "to", None))


def item(value: Any) -> Any:
    """Return the number in a tensor of one element or a scalar of NumPy, and anything else as it is."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value
    shape = getattr(value, "shape", None)  # of some objects an array, or other than of numbers
    is_scalar = isinstance(shape, tuple) and not shape and callable(getattr(value, "item", None))
    return value.item() if is_scalar else value


def tensors(value: object) -> list[Tensor]:
    """Return the tensors in `value`, in its order."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) is tuple:
        return [tensor for part in value for tensor in tensors(part)]
    parts = _parts(value)
    return [] if parts is None else [tensor for part in parts.values() for tensor in tensors(part)]


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's elements in their order; they may share its memory."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element may have any stride


def checksum(batch: Any) -> int | None:
    """Return a checksum of some of the values in a batch; None if it has no dense tensors of torch's own class."""
    found = None

    def add(tensor: Tensor) -> Tensor:
        nonlocal found
        is_dense = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
        if is_dense and type(tensor) is Tensor:
            in_memory = tensor.detach().permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
            some = in_memory.reshape(-1)[:: max(1, tensor.numel() // _CHECKED)]  # dense tensors are not copied
            found = crc32(bytes_of(some.cpu()).numpy().tobytes(), found or 0)
        return tensor

    def leave(part: Any) -> Any:  # a class that moves itself need not let others read its parts
        return part if _moves_itself(part) and not isinstance(part, (dict, list, tuple, UserDict)) else NotImplemented

    _mapped(batch, add, others=leave, reuse=True)
    return found


def with_tensors(value: T, others: Iterable[Tensor]) -> T:
    """Return `value` with other tensors in the place of its own, in the order of `tensors(value)`."""
    rest = iter(others)
    return _mapped(value, lambda tensor: next(rest))


def detached(value: T) -> T:
    """Return `value` with its tensors detached, so that they do not keep their graph alive."""
    return _mapped(value, lambda tensor: tensor.detach() if tensor.requires_grad else tensor)


def cast(value: T, dtype: torch.dtype) -> T:
    """Return `value` with its floating-point tensors in a dtype. A container without any to cast is returned itself."""

    def to_dtype(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return _mapped(value, to_dtype, reuse=True)


def rows(batch: Any) -> int:
    """Return the number of rows of a batch: the length of its first tensor; 0 if that is not to be found."""
    while not isinstance(batch, Tensor):
        if isinstance(batch, Mapping):
            batch = next(iter(batch.values()), None)
        elif isinstance(batch, (list, tuple)) and batch:
            batch = batch[0]
        else:
            return 0
    return batch.shape[0] if batch.dim() else 0


def described(value: object, depth: int = 3) -> str:
    """Return a batch as text: dtype, shape and device of its tensors, and the classes of everything else."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} on {value.device}"
    parts = _parts(value) if depth else None
    items = [*parts.items()] if parts is not None else []  # a TensorDict has no truth value, and the length of its rows
    if not items:
        return kind_of(value)
    shown = [
        (f"{key!r}: " if isinstance(key, str) else "") + described(part, depth - 1) for key, part in items[:_SHOWN]
    ]
    more = [f"and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return f"{kind_of(value)} of ({', '.join(shown + more)})"


def _mapped(
    value: T,
    change: Callable[[Any], Any],
    *,
    others: Callable[[Any], Any] = lambda part: NotImplemented,
    reuse: bool = False,
) -> T:
    """Return `value` with `change` applied to its tensors.

    `others` is applied to every other part, and returns NotImplemented for one that may be a container to look into.
    With `reuse`, a container of which no part has changed is returned itself, not as a copy.
    """
    changed: T = change(value) if isinstance(value, Tensor) else others(value)
    if changed is not NotImplemented:
        return changed
    parts = _parts(value)
    if parts is None:
        return value
    mapped = {key: _mapped(part, change, others=others, reuse=reuse) for key, part in parts.items()}
    if reuse and all(new is old for new, old in zip(mapped.values(), parts.values(), strict=True)):
        return value
    result: T = _rebuilt(value, mapped)
    return result


def _parts(value: Any) -> Mapping[Any, Any] | None:
    """Return a container's parts by key, index or field; None for anything else."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: getattr(value, field.name) for field in fields if hasattr(value, field.name)}
    return None


def _rebuilt(value: Any, parts: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return parts  # torch.compile cannot trace `copy`
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*parts.values())
    if isinstance(value, (list, tuple)):
        return type(value)(list(parts.values()))
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)(parts)  # type: ignore[call-arg]
    try:
        twin = copy.copy(value)  # keeps what a subclass has beside its entries, such as a default
    except KeyError:  # Python 3.10 asks a dict whose attributes are its entries for `__getstate__`
        kind: Any = type(value)
        twin = kind.__new__(kind)
        vars(twin).update(vars(value))
    for name, part in parts.items():
        if isinstance(value, Mapping):  # before dataclasses: Hugging Face's outputs are both
            twin[name] = part
        elif part is not getattr(value, name):
            object.__setattr__(twin, name, part)  # works for a frozen dataclass, too
    return twin

"""Conversion of state trees to JSON and named tensors, so that reading a checkpoint runs no code.

JSON has no tuples, integer keys and tensors; they become objects with the key `"$"`. A tensor is stored once, under its
path in the tree, so tied weights stay tied.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

import torch
from torch import Tensor

from accelcore.errors import CheckpointError
from accelcore.optim.shards import is_sharded, rows_of, shard
from accelcore.util.text import kind_of

__all__ = ["Pieces", "decode", "encode"]

Pieces = dict[str, tuple[Tensor, int, int]]
"""Shards of tensors by name, each with its first row and its number of rows."""

_TAG = "$"
_DTYPES = {
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
}  # fmt: skip
"""Dtypes that safetensors stores."""


def encode(tree: Any, pieces: Pieces | None = None) -> tuple[Any, dict[str, Tensor]]:
    """Split a tree of dicts, lists, tuples, counters, plain values and tensors into JSON data and CPU tensors.

    Args:
        tree: the state tree.
        pieces: receives this rank's shards of sharded tensors, which are then not among the returned tensors.

    Raises:
        CheckpointError: the tree holds another type; the message names its path.
    """
    tensors: dict[str, Tensor] = {}
    stored: dict[tuple[Any, ...], str] = {}
    buffers: set[int] = set()

    def walk(value: Any, path: str) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            return {_TAG: "tensor", "name": store(value, path)}
        if isinstance(value, list):
            return [walk(entry, f"{path}.{number}") for number, entry in enumerate(value)]
        if isinstance(value, tuple):
            return {_TAG: "tuple", "items": walk(list(value), path)}
        if isinstance(value, dict):
            plain = type(value) is not Counter and all(isinstance(key, str) and key != _TAG for key in value)
            if plain:
                return {key: walk(entry, f"{path}.{key}") for key, entry in value.items()}
            pairs = [[walk(key, path), walk(entry, f"{path}.{key}")] for key, entry in value.items()]
            return {_TAG: "counter" if isinstance(value, Counter) else "dict", "pairs": pairs}
        raise CheckpointError(
            f"{path.lstrip('.')} is {kind_of(value)}, which a checkpoint cannot hold",
            available="None, bools, numbers, strings, tensors, and lists, tuples and dicts of these",
            remedy="convert it to one of those, or do not save it",
        )

    def store(tensor: Tensor, path: str) -> str:
        # Views of the same memory with the same shape are one tensor; any other view is copied.
        divided = is_sharded(tensor) and pieces is not None
        whole, tensor = tensor, shard(tensor)
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{path.lstrip('.')} is a {tensor.layout} tensor of {tensor.dtype}, which a checkpoint cannot hold",
                available="dense tensors of the dtypes that safetensors knows",
                remedy="save between two windows if it is a sparse gradient; otherwise convert it in its state_dict",
            )
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in stored:
            return stored[place]
        name = path.lstrip(".")
        while name in tensors or (pieces is not None and name in pieces):
            name += "_"
        stored[place] = name
        own = tensor.cpu().contiguous()
        storage = own.untyped_storage()
        if storage.nbytes() > own.nbytes or storage.data_ptr() in buffers:
            own = own.clone()
        buffers.add(own.untyped_storage().data_ptr())
        if divided and pieces is not None and is_sharded(whole):
            pieces[name] = (own, *rows_of(whole))
        else:
            tensors[name] = own
        return name

    return walk(tree, ""), tensors


class Tensors(Protocol):
    """Mapping of names to tensors."""

    def __getitem__(self, name: str, /) -> Tensor: ...


def decode(data: Any, tensors: Tensors) -> Any:
    """Return the tree that `encode` split.

    Raises:
        CheckpointError: the data is malformed.
    """
    if isinstance(data, list):
        return [decode(entry, tensors) for entry in data]
    if not isinstance(data, dict):
        return data
    if _TAG not in data:
        return {key: decode(entry, tensors) for key, entry in data.items()}
    try:
        if data[_TAG] == "tensor":
            return tensors[data["name"]]
        if data[_TAG] == "tuple":
            return tuple(decode(data["items"], tensors))
        if data[_TAG] in ("dict", "counter"):
            pairs = {decode(key, tensors): decode(entry, tensors) for key, entry in data["pairs"]}
            return Counter(pairs) if data[_TAG] == "counter" else pairs
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError("the checkpoint holds an entry that cannot be read", why=repr(error)) from error
    raise CheckpointError(f"the checkpoint holds an entry of unknown kind {data[_TAG]!r}")

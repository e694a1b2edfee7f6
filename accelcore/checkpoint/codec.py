"""Conversion of state trees to JSON and named tensors, so that reading a checkpoint runs no code.

JSON has no tuples, integer keys and tensors; they become objects with the key `"$"`. A tensor is stored once, under its
path in the tree, so tied weights stay tied. `StoredTensors` reads them, whole or only the rows that a rank needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Size, Tensor

from accelcore.errors import CheckpointError
from accelcore.optim.shards import as_shard, is_sharded, rows_of, to_local
from accelcore.util.containers import item
from accelcore.util.text import kind_of

Pieces = dict[str, tuple[Tensor, int, int]]  # shards of tensors by name, each with its first row and its number of rows

_TAG = "$"
_DEEPEST = 100  # levels of lists, tuples and dicts. Readers of JSON fail at some depth; how deep depends on the Python.
_DTYPES = {
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
}  # fmt: skip
"""Dtypes that safetensors stores."""

LikeOf = Callable[[str, Size], "Tensor | None"]
"""Function of a tensor's name and shape that returns the sharded tensor to divide it like; None to read it whole."""

StoredRows = tuple[str, int, int]  # file, first row and number of the rows of a tensor


def encode(tree: Any, pieces: Pieces | None = None) -> tuple[Any, dict[str, Tensor]]:
    """Split a tree of dicts, lists, tuples, counters, plain values and tensors into JSON data and CPU tensors.

    `pieces` receives this rank's shards of sharded tensors, which are then not among the returned tensors. An error for
    another type, or for a tree that holds itself, names the path.
    """
    tensors: dict[str, Tensor] = {}
    stored: dict[tuple[Any, ...], str] = {}
    buffers: set[int] = set()

    def walk(value: Any, path: str, above: tuple[int, ...] = ()) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            return {_TAG: "tensor", "name": store(value, path)}
        if isinstance(number := item(value), bool | int | float):
            return number
        if id(value) in above or len(above) > _DEEPEST:
            problem = "holds itself" if id(value) in above else f"is nested more than {_DEEPEST} deep"
            raise CheckpointError(f"{path.lstrip('.')[:80]} {problem}", remedy="do not save it")
        above = (*above, id(value))
        if isinstance(value, list | tuple):
            items = [walk(entry, f"{path}.{number}", above) for number, entry in enumerate(value)]
            return items if isinstance(value, list) else {_TAG: "tuple", "items": items}
        if isinstance(value, dict):
            if type(value) is not Counter and all(isinstance(key, str) and key != _TAG for key in value):
                return {key: walk(entry, f"{path}.{key}", above) for key, entry in value.items()}
            pairs = [[walk(key, path, above), walk(entry, f"{path}.{key}", above)] for key, entry in value.items()]
            return {_TAG: "counter" if isinstance(value, Counter) else "dict", "pairs": pairs}
        raise CheckpointError(
            f"{path.lstrip('.')} is {kind_of(value)}, which a checkpoint cannot hold",
            available="None, bools, numbers, strings, tensors, and lists, tuples and dicts of these",
            remedy="convert it to one of these, as NumPy's arrays by torch.from_numpy(array), or do not save it",
        )

    def store(tensor: Tensor, path: str) -> str:
        # Views of the same memory with the same shape are one tensor; any other view is copied.
        whole, tensor = tensor, to_local(tensor)
        is_dense = tensor.layout is torch.strided and not tensor.is_quantized and tensor.dtype in _DTYPES
        # A tensor on the meta device, and one of a class that is made of other tensors, have no memory of their own.
        if not is_dense or (tensor.numel() and not tensor.data_ptr()):
            raise CheckpointError(
                f"{path.lstrip('.')} is {kind_of(tensor)}, {tensor.layout}, {tensor.dtype}, on {tensor.device.type}, "
                "which a checkpoint cannot hold",
                available="dense tensors with values, of the dtypes that safetensors knows, in memory of their own",
                remedy="save between two windows if it is a sparse gradient; otherwise convert it in its state_dict",
            )
        bits = tensor.is_conj(), tensor.is_neg()
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, *bits)
        if tensor.numel() and place in stored:
            return stored[place]
        name = path.lstrip(".")
        while name in tensors or (pieces is not None and name in pieces):
            name += "_"
        stored[place] = name
        own = tensor.cpu().resolve_conj().resolve_neg().contiguous()  # safetensors writes memory, without these bits
        storage = own.untyped_storage()
        if storage.nbytes() > own.nbytes or storage.data_ptr() in buffers:
            own = own.clone()
        buffers.add(own.untyped_storage().data_ptr())
        if pieces is not None and is_sharded(whole):
            pieces[name] = (own, *rows_of(whole))
        else:
            tensors[name] = own
        return name

    return walk(tree, ""), tensors


def decode(data: Any, tensors: Mapping[str, Tensor] | StoredTensors) -> Any:
    """Return the tree that `encode` split; raise CheckpointError if the data is malformed."""
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


class StoredTensors:
    """CPU tensors of a checkpoint's file by name, read when asked for; closing it closes the files.

    `pieces` has the rows of each sharded tensor. Of a tensor that is divided like `like_of(...)`, only this rank's rows
    are read.
    """

    def __init__(self, folder: Path, file: str, pieces: Mapping[str, Sequence[StoredRows]], like_of: LikeOf) -> None:
        self._folder, self._name, self._pieces, self._like_of = folder, file, pieces, like_of
        self._files: dict[str, Any] = {}
        self._held = ExitStack()
        self._known: dict[str, Tensor] = {}

    def close(self) -> None:
        self._held.close()

    @property
    def metadata(self) -> dict[str, str]:
        found: dict[str, str] = self._file(self._name).metadata()
        return found

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self._file(self._name).keys())  # which lists all names in each call

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor; the same object each time. Raise ValueError if some of its rows are missing."""
        if name not in self._known:
            with torch.device("cpu"):  # safetensors would read to the default device
                self._known[name] = self._read(name)
        return self._known[name]

    def _read(self, name: str) -> Tensor:
        parts = self._pieces.get(name)
        if parts is None:
            file = self._file(self._name)
            if name not in self._names:
                raise KeyError(name)
            shape = Size(file.get_slice(name).get_shape())
            if not shape:
                tensor: Tensor = file.get_tensor(name)
                return tensor
            parts = [(self._name, 0, shape[0])]
        else:
            end = 0
            for _, first, count in parts:
                if first != end:
                    raise ValueError(f"{name!r} lacks rows from {end} on")
                end += count
            shape = Size([end, *self._file(parts[0][0]).get_slice(name).get_shape()[1:]])
        like = self._like_of(name, shape)
        if like is None or not is_sharded(like):
            return self._rows(name, parts, 0, shape[0])
        return as_shard(self._rows(name, parts, *rows_of(like)), like)

    def _rows(self, name: str, parts: Sequence[StoredRows], first: int, count: int) -> Tensor:
        found = []
        for file, begin, size in parts:
            low, high = max(first, begin), min(first + count, begin + size)
            if low < high or (not count and file == parts[0][0]):
                found.append(self._file(file).get_slice(name)[max(0, low - begin) : max(0, high - begin)])
        return found[0] if len(found) == 1 else torch.cat(found)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            opened = safe_open(self._folder / f"{name}.safetensors", framework="pt")
            self._files[name] = self._held.enter_context(opened)
        return self._files[name]

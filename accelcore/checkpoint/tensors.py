"""Lazy reading of the tensors of a checkpoint's part: whole, or only the rows that one rank needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Size, Tensor

from accelcore.optim.shards import as_shard, is_sharded, rows_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Layout", "Place", "StoredTensors"]

Layout = Callable[[str, Size], "Tensor | None"]
"""Function of a tensor's name and shape: the sharded tensor whose layout it gets; None to read it whole."""

Place = tuple[str, int, int]
"""File, first row and number of the rows of a tensor."""


class StoredTensors:
    """Mapping of names to CPU tensors; a `with` keeps the files open.

    Args:
        folder: the checkpoint.
        part: the file of the tensors that are stored whole.
        pieces: the places of the rows of each sharded tensor.
        layout: returns the layout of each tensor; only the rows of this rank are read.
    """

    def __init__(self, folder: Path, part: str, pieces: Mapping[str, Sequence[Place]], layout: Layout) -> None:
        self._folder, self._part, self._pieces, self._layout = folder, part, pieces, layout
        self._files: dict[str, Any] = {}
        self._held = ExitStack()
        self._known: dict[str, Tensor] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held.close()

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata in the part's own file."""
        found: dict[str, str] = self._file(self._part).metadata()
        return found

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor; the same object each time.

        Raises:
            KeyError: there is no tensor of that name.
            ValueError: some of its rows are missing.
        """
        if name not in self._known:
            self._known[name] = self._read(name)
        return self._known[name]

    def _read(self, name: str) -> Tensor:
        places = self._pieces.get(name)
        if places is None:
            whole = self._file(self._part).get_slice(name) if name in self._file(self._part).keys() else None  # noqa: SIM118
            if whole is None:
                raise KeyError(name)
            shape = Size(whole.get_shape())
            if not shape:
                tensor: Tensor = self._file(self._part).get_tensor(name)
                return tensor
            places = [(self._part, 0, shape[0])]
        else:
            end = 0
            for _, first, count in places:
                if first != end:
                    raise ValueError(f"{name!r} lacks rows from {end} on")
                end += count
            shape = Size([end, *self._file(places[0][0]).get_slice(name).get_shape()[1:]])
        like = self._layout(name, shape)
        if like is None or not is_sharded(like):
            return self._rows(name, places, 0, shape[0])
        return as_shard(self._rows(name, places, *rows_of(like)), like)

    def _rows(self, name: str, places: Sequence[Place], first: int, count: int) -> Tensor:
        found = []
        for file, begin, size in places:
            low, high = max(first, begin), min(first + count, begin + size)
            if low < high or (not count and file == places[0][0]):
                found.append(self._file(file).get_slice(name)[max(0, low - begin) : max(0, high - begin)])
        return found[0] if len(found) == 1 else torch.cat(found)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            opened = safe_open(self._folder / f"{name}.safetensors", framework="pt")
            self._files[name] = self._held.enter_context(opened)
        return self._files[name]

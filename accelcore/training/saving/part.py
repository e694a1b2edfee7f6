"""Contract of a part of a checkpoint, and checks of what was saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from accelcore.errors import CheckpointError
from accelcore.util.text import is_whole

__all__ = ["Part", "Saved", "kind", "number", "table"]


@dataclass(frozen=True)
class Saved:
    """Contents of a verified checkpoint.

    Attributes:
        model: the model's state_dict.
        shared: the state of each part that all ranks share, by the part's name.
        own: the state of each part that belongs to this rank.
        same_job: whether as many ranks saved it as there are now, so that `own` is this rank's own.
    """

    model: Mapping[str, Any]
    shared: Mapping[str, Any]
    own: Mapping[str, Any]
    same_job: bool


class Part(ABC):
    """One kind of state.

    Attributes:
        name: its key in the checkpoint.
        scope: "shared" if rank 0 saves it for all ranks, "rank" if each rank saves its own.
    """

    name: str
    scope: Literal["shared", "rank"] = "shared"

    @abstractmethod
    def state(self) -> Any:
        """Return a tree of dicts, lists, tuples, plain values and tensors."""

    @abstractmethod
    def prepare(self, saved: Saved) -> Callable[[], object]:
        """Check and convert the saved state without changing anything, and return the function that restores it.

        Raises:
            CheckpointError: the saved state is malformed, or does not fit.
        """


def table(tree: Any, what: str, *keys: str) -> dict[str, Any]:
    """Return `tree`; raise CheckpointError if it is not a dict with these keys."""
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise CheckpointError(f"the checkpoint's {what} is a {type(tree).__name__}, not a dict")
    if missing := [key for key in keys if key not in tree]:
        raise CheckpointError(f"the checkpoint's {what} lacks {', '.join(missing)}")
    return tree


def number(value: Any, what: str) -> int:
    """Return `value`; raise CheckpointError if it is not a whole number >= 0."""
    if not is_whole(value):
        raise CheckpointError(f"the checkpoint has {what}={value!r}, which is not a count")
    return value


def kind(value: Any) -> str:
    """Return what two values must have in common to replace each other: shape and dtype, or the class."""
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__

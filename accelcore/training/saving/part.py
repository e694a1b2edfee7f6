"""Contract of a part of a checkpoint, and checks of what was saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from accelcore.errors import CheckpointError
from accelcore.util.text import is_whole

__all__ = ["Part", "Saved", "as_dict", "kind", "malformed", "number"]


@dataclass(frozen=True)
class Saved:
    """Contents of a verified checkpoint.

    Attributes:
        model: the model's state_dict.
        shared: the `state` of each part, by its name.
        own: the `own_state` of each part, by its name.
        same_job: whether as many ranks saved it as there are now, so that `own` is this rank's own.
    """

    model: Mapping[str, Any]
    shared: Mapping[str, Any]
    own: Mapping[str, Any]
    same_job: bool


class Part(ABC):
    """One kind of state, under its `name` in the files of a checkpoint.

    States are trees of dicts, lists, tuples, plain values and tensors.
    """

    name: str

    def state(self) -> Any:
        """Return the state that all ranks share: it is equal on them, or divided by rows. None: nothing to save."""
        return None

    def own_state(self) -> Any:
        """Return the state that belongs to this rank. None: nothing to save."""
        return None

    @abstractmethod
    def prepare(self, saved: Saved) -> Callable[[], object]:
        """Check and convert the saved state without changing anything, and return the function that restores it.

        Raises:
            CheckpointError: the saved state is malformed, or does not fit.
        """


def malformed(problem: str) -> CheckpointError:
    """Return the error for a state that no part has saved."""
    return CheckpointError(problem, remedy="resume from another checkpoint: this one was changed, or written otherwise")


def as_dict(tree: Any, what: str, *keys: str) -> dict[str, Any]:
    """Return `tree`; raise CheckpointError if it is not a dict with these keys."""
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise malformed(f"the checkpoint's {what} is a {type(tree).__name__}, not a dict")
    if missing := [key for key in keys if key not in tree]:
        raise malformed(f"the checkpoint's {what} lacks {', '.join(missing)}")
    return tree


def number(value: Any, what: str) -> int:
    """Return `value`; raise CheckpointError if it is not a whole number >= 0."""
    if not is_whole(value):
        raise malformed(f"the checkpoint has {what}={value!r}, which is not a count")
    return value


def kind(value: Any) -> str:
    """Return what two values must have in common to replace each other: shape and dtype, or the class."""
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__

"""What a kind of state has to do to be saved and restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from accelcore.errors import CheckpointError
from accelcore.wording import is_whole

__all__ = ["Change", "Part", "Saved", "kind", "number", "table"]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read and verified.

    Attributes:
        model: the model's state_dict.
        shared: the state of each part that all ranks have in common, by the part's name.
        own: the state of each part that is this rank's own.
        same_job: whether as many ranks saved it as there are now, so that each finds its own state.
    """

    model: Mapping[str, Any]
    shared: Mapping[str, Any]
    own: Mapping[str, Any]
    same_job: bool


@dataclass(frozen=True)
class Change:
    """How a part is restored, when nothing stands against it any more.

    Attributes:
        commit: restores it.
        undo: puts back what `commit` has changed, or half changed, and raises where it cannot; None where nothing in
            `commit` can fail, because it calls no code of others.
    """

    commit: Callable[[], None]
    undo: Callable[[], None] | None = None


class Part(Protocol):
    """One kind of state.

    Attributes:
        name: under which it is saved.
        scope: whether it is saved once for all ranks, or by each rank.
    """

    @property
    def name(self) -> str: ...

    @property
    def scope(self) -> Literal["shared", "rank"]: ...

    def state(self) -> Any:
        """A tree of dicts, lists, tuples, plain values and tensors."""

    def prepare(self, saved: Saved) -> Change:
        """Check and convert everything, and change nothing.

        Raises:
            CheckpointError: what was saved is not of this part's form, or does not fit.
        """


def table(tree: Any, what: str, *keys: str) -> dict[str, Any]:
    """`tree`, which has to be a dict with these keys, or the checkpoint is refused."""
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise CheckpointError(f"the checkpoint holds no {what}, but a {type(tree).__name__}")
    missing = [key for key in keys if key not in tree]
    if missing:
        raise CheckpointError(f"the checkpoint's {what} lacks {', '.join(missing)}")
    return tree


def number(value: Any, what: str) -> int:
    """`value`, which has to be a whole number >= 0, or the checkpoint is refused."""
    if not is_whole(value):
        raise CheckpointError(f"the checkpoint says {what}={value!r}, which is no count")
    return value


def kind(value: Any) -> str:
    """What two values must have in common to take each other's place."""
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__

"""What a script adds to its checkpoints."""

from __future__ import annotations

from typing import Any, Literal

from accelcore.errors import CheckpointError
from accelcore.training.parts.part import Change, Saved

__all__ = ["ExtraPart"]


class ExtraPart:
    """A dict of the script's own: plain values, tensors, and lists, tuples and dicts of these.

    Args:
        name: where it lies in the checkpoint.
    """

    scope: Literal["shared"] = "shared"

    def __init__(self, extra: dict[str, Any], name: str = "extra") -> None:
        self._extra, self.name = extra, name

    def state(self) -> Any:
        return self._extra

    def prepare(self, saved: Saved) -> Change:
        extra = saved.shared.get(self.name)
        if not isinstance(extra, dict):
            raise CheckpointError(f"the checkpoint's extra is no dict, but {extra!r}")

        def commit() -> None:
            self._extra.clear()
            self._extra.update(extra)

        return Change(commit)

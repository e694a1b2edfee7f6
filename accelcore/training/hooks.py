"""Hooks that a training registers on the user's model, and removes with the trainer."""

from __future__ import annotations

from contextlib import ExitStack

from torch.utils.hooks import RemovableHandle

__all__ = ["Hooks"]


class Hooks(ExitStack):
    """Calls that remove hooks from a model, made by `close` or when this object is deleted with its trainer."""

    def add(self, *handles: RemovableHandle) -> None:
        """Remove these hooks by `close`."""
        for handle in handles:
            self.callback(handle.remove)

    def __del__(self) -> None:
        self.close()

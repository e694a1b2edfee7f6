"""What train_gpt.py uses when its output is no terminal."""

from __future__ import annotations

from typing import Any


class _Column:
    def __init__(self, *args: Any, **options: Any) -> None:
        pass


BarColumn = TextColumn = TimeRemainingColumn = _Column


class Progress:
    def __init__(self, *columns: _Column, disable: bool) -> None:
        self.disable = disable

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def add_task(self, description: str, **options: Any) -> int:
        return 0

    def update(self, task: int, **options: Any) -> None:
        pass

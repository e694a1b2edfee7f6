"""Other places for the figures of a log: TensorBoard, Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["TensorBoard", "WandB"]

_ID = "wandb-id"


class TensorBoard:
    """Event files in a folder. TensorBoard hides what was written after the steps that are `done`."""

    def __init__(self, folder: Path, done: int) -> None:
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder), purge_step=done + 1)

    def write(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name != "step":
                self._writer.add_scalar(name, value, values["step"])

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases. If steps are `done`, it continues the run whose name is in the folder."""

    def __init__(self, folder: Path, done: int, options: Mapping[str, Any]) -> None:
        file = folder / _ID
        known = {"id": file.read_text(encoding="utf-8"), "resume": "allow"} if done and file.exists() else {}
        self._run = import_module("wandb").init(**{"dir": str(folder), **known, **options})
        file.write_text(self._run.id, encoding="utf-8")

    def write(self, values: dict[str, Any]) -> None:
        figures = {name: value for name, value in values.items() if name != "step"}
        self._run.log(figures, step=values["step"])

    def close(self) -> None:
        self._run.finish()

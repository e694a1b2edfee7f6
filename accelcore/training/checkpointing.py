"""What a trainer does with checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelcore.errors import ConfigurationError
from accelcore.training.state import TrainingState, load, resume, save

__all__ = ["Checkpointing"]


class Checkpointing(ABC):
    """Gives a trainer its words for saving and restoring."""

    steps: int
    extra: dict[str, Any]
    _run: str

    @abstractmethod
    def _state(self) -> TrainingState:
        """What a checkpoint is made of, where none of it is in motion."""

    @abstractmethod
    def _restored(self) -> None:
        """What a checkpoint is made of was written to."""

    def save(self, folder: str | Path, *, keep: int | None = None, extra: Mapping[str, Any] | None = None) -> Path:
        """Save all that is needed to go on as if nothing had happened, as a new checkpoint in `folder`.

        Model, optimizer, scaler, schedule, position in the data, random states, gradients of an open window. It
        appears whole or not at all. In a job every rank calls this, with a folder that all of them share.

        Args:
            keep: delete all but the newest `keep` checkpoints of this run afterwards; None deletes nothing.
            extra: what else to save, such as the best score: plain values, tensors, and lists and dicts of these. It
                becomes `trainer.extra`, which later saves keep; in a job rank 0's is saved.
        """
        if not isinstance(extra, Mapping | None):
            raise ConfigurationError(
                f"extra={extra!r} is no dict", remedy='give what is saved a name: extra={"best": 0.5}'
            )
        if extra is not None:
            self.extra = dict(extra)
        return save(self._state(), Path(folder), steps=self.steps, keep=keep)

    def resume(self, folder: str | Path) -> Path | None:
        """Go on from the newest checkpoint in `folder`, or from `folder` if it is itself one, whatever their names.

        Returns:
            The checkpoint, or None where there is none.

        Raises:
            CheckpointError: it is damaged, or belongs to another model; on all ranks alike, and this trainer is left
                as it was.
        """
        found = resume(self._state(), Path(folder))
        if found is None:
            return None
        path, self.steps, self._run = found
        self._restored()
        return path

    def load(self, path: str | Path) -> dict[str, Any]:
        """Begin with what another program has saved: the model, and the optimizer's state where it is there, too.

        Args:
            path: a file of `torch.save` (`.pth`, `.pt`, Lightning's `.ckpt`) or of safetensors, or a folder of
                accelerate's. It is read without running code (`weights_only`). Every rank reads it.

        Returns:
            What else is in the file, such as its epoch, to do with as you like: `trainer.epoch = rest["epoch"] + 1`.

        Raises:
            CheckpointError: it cannot be read, or does not fit; this trainer is left as it was.
        """
        rest = load(self._state(), Path(path))
        self._restored()
        return rest

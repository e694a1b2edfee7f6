"""The loss scale of a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from accelcore.errors import CheckpointError
from accelcore.roles.scaler import LossScaler, described
from accelcore.training.parts.part import Change, Saved, table
from accelcore.training.parts.put_back import put_back

__all__ = ["ScalerPart"]

logger = logging.getLogger("accelcore")


class ScalerPart:
    """The loss scaler.

    A training with another kind of loss scale goes on with its own.
    """

    name = "scaler"
    scope: Literal["shared"] = "shared"

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler = scaler

    def state(self) -> Any:
        return self._scaler.state_dict()

    def prepare(self, saved: Saved) -> Change:
        return _restoring(self._scaler, table(saved.shared.get("scaler") or {}, "loss scaler"), saved)


def _restoring(scaler: LossScaler, state: Mapping[str, Any], saved: Saved) -> Change:
    before = scaler.state_dict()
    if scaler.takes(state):
        return Change(
            lambda: scaler.load_state_dict(state), lambda: put_back(scaler.load_state_dict, before, scaler.state_dict)
        )
    if table(saved.own.get("window"), "window", "micro")["micro"]:
        raise CheckpointError(
            "the checkpoint was saved within a window, with another loss scale than this training's",
            why="the gradients in it are multiplied by the loss scale of then",
            remedy="resume with the precision it was made with, or from a checkpoint saved between two windows",
        )
    logger.warning(
        "the checkpoint has %s, and this training %s: it goes on with its own", described(state), described(before)
    )
    return Change(lambda: None)

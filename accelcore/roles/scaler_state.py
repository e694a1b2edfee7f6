"""The state of loss scalers, as ours, torch's, torch_npu's and apex's write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelcore.errors import CheckpointError

__all__ = ["VERSION", "as_torch_writes", "check_version", "described", "is_static", "static_scale"]

VERSION = 1
"""Of the states that are written here; states of others, and older ones, have none."""

_OF_APEX = {"loss_scale", "unskipped"}
_OF_TORCH = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def is_static(state: Mapping[str, Any]) -> bool:
    """Whether this is the state of a static scale. apex writes the same for both, and it may be."""
    return set(state) in ({"scale"}, _OF_APEX) or ("dynamic" in state and not state["dynamic"])


def static_scale(state: Mapping[str, Any]) -> Any:
    """The scale of a static scaler's state.

    Raises:
        CheckpointError: it is none.
    """
    check_version(state)
    if not is_static(state):
        raise CheckpointError(f"the checkpoint holds no static loss scale but {sorted(state) or 'none at all'}")
    return state.get("scale", state.get("loss_scale"))


def as_torch_writes(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A dynamic scaler's state under torch's keys.

    Raises:
        CheckpointError: it is none, or not whole.
    """
    check_version(state)
    if set(state) == _OF_APEX:
        return {"scale": state["loss_scale"], "_growth_tracker": state["unskipped"]}
    missing = [key for key in _OF_TORCH if key not in state]
    if missing:
        raise CheckpointError(f"the state of the loss scaler lacks {', '.join(sorted(missing))}")
    return state


def check_version(state: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a state that was written in a form that is not known here."""
    version = state.get("version", VERSION)
    if version != VERSION:
        raise CheckpointError(
            f"the state of the loss scaler is of version {version!r}, and this accelcore knows {VERSION}",
            remedy="read it with the version of accelcore that wrote it",
        )


def described(state: Mapping[str, Any]) -> str:
    """A state in words."""
    if not state:
        return "no loss scale"
    kind = "static" if is_static(state) else "dynamic"
    return f"a {kind} loss scale of {state.get('scale', state.get('loss_scale'))}"

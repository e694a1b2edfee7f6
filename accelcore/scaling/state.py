"""State of loss scalers as accelcore, torch, torch_npu and apex write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelcore.errors import CheckpointError

__all__ = ["VERSION", "as_torch_writes", "described", "is_static", "static_scale"]

VERSION = 1
"""Version of the states written here. States of other libraries have none."""

_OF_APEX = {"loss_scale", "unskipped"}
_OF_TORCH = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def is_static(state: Mapping[str, Any]) -> bool:
    """Return whether this may be the state of a static scale; apex writes the same for both kinds."""
    return set(state) == _OF_APEX or ("dynamic" in state and not state["dynamic"])


def static_scale(state: Mapping[str, Any]) -> Any:
    """Return the scale in a static scaler's state.

    Raises:
        CheckpointError: it is not the state of a static scaler.
    """
    _check_version(state)
    if not is_static(state):
        raise CheckpointError(f"the checkpoint has {described(state)}, and this training has a static one")
    return state.get("scale", state.get("loss_scale"))


def as_torch_writes(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a dynamic scaler's state under torch's keys.

    Raises:
        CheckpointError: it is not the state of a dynamic scaler, or lacks keys.
    """
    _check_version(state)
    if set(state) == _OF_APEX:
        return {"scale": state["loss_scale"], "_growth_tracker": state["unskipped"]}
    missing = [key for key in _OF_TORCH if key not in state]
    if missing:
        raise CheckpointError(f"the state of the loss scaler lacks {', '.join(sorted(missing))}")
    return state


def described(state: Mapping[str, Any]) -> str:
    """Return a state as text, such as `a dynamic loss scale of 65536.0`."""
    if not state:
        return "no loss scale"
    kind = "static" if is_static(state) else "dynamic"
    return f"a {kind} loss scale of {state.get('scale', state.get('loss_scale'))}"


def _check_version(state: Mapping[str, Any]) -> None:
    version = state.get("version", VERSION)
    if version != VERSION:
        raise CheckpointError(
            f"the state of the loss scaler has version {version!r}, and this accelcore reads version {VERSION}",
            remedy="load it with the version of accelcore that saved it",
        )

"""Deterministic results on CUDA: cuDNN's algorithms and cuBLAS's workspace, beside torch's own switch."""

from __future__ import annotations

import logging
import os

import torch

from accelcore.errors import ConfigurationError
from accelcore.util.text import shown

__all__ = ["make_deterministic"]

logger = logging.getLogger("accelcore")

_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC = (":4096:8", ":16:8")


def make_deterministic(device: torch.device) -> None:
    """Make cuDNN and cuBLAS deterministic for the rest of the process.

    cuBLAS and torch read CUBLAS_WORKSPACE_CONFIG once, at the first matrix product. It is not known if one ran already,
    unless the device has never held a tensor. Otherwise a warning is logged.

    Raises:
        ConfigurationError: CUBLAS_WORKSPACE_CONFIG asks for a workspace that is not deterministic.
    """
    value = os.environ.get(_VARIABLE)
    if value is None:
        os.environ[_VARIABLE] = _DETERMINISTIC[0]
        if torch.cuda.memory_stats(device).get("allocation.all.allocated", 0):
            logger.warning(
                "%s=%s was set after the device was used: if a matrix product already ran, torch refuses later ones; "
                "seed before the first, or set the variable before the script starts",
                _VARIABLE,
                _DETERMINISTIC[0],
            )
    elif value not in _DETERMINISTIC:
        raise ConfigurationError(
            f"{_VARIABLE}={shown(value)} does not give deterministic results",
            available=", ".join(_DETERMINISTIC),
            remedy="set it to one of those, or unset it",
        )
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False

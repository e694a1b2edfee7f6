"""accelcore on Ascend NPU: the plugin's entry module, free of torch and of CANN.

This release finds out whether an NPU could work here and why not; the backend itself is not part of it yet, and the
probe says so.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from accelcore.errors import BackendUnavailableError
from accelcore.hookspecs import hookimpl
from accelcore.probe import Probe

if TYPE_CHECKING:
    from accelcore.backend import Backend

__all__ = ["accelcore_create_backend", "accelcore_probe"]

_DEVICES = Path("/dev")
_ENVIRONMENT = ("ASCEND_RT_VISIBLE_DEVICES", "ASCEND_HOME_PATH", "ASCEND_OPP_PATH")
_DISTRIBUTIONS = ("torch-npu",)
_NOT_YET = "this release of accelcore-npu finds NPUs but has no backend to drive them"
_NOT_YET_REMEDY = "use another backend, such as cpu, or a later release of accelcore-npu"


@hookimpl
def accelcore_probe() -> Probe:
    """Look at device files, the CANN environment and package metadata; nothing is imported or initialised."""
    reason, remedy = _obstacle()
    return Probe(
        "npu",
        available=False,
        reason=reason,
        remedy=remedy,
        priority=100,
        environment=_ENVIRONMENT,
        # Where nothing but this release is in the way, a script of its own may well use the vendor's runtime.
        distributions=() if reason == _NOT_YET else _DISTRIBUTIONS,
    )


@hookimpl
def accelcore_create_backend(name: str, index: int) -> Backend | None:
    """Refuse: there is no NPU backend in this release."""
    if name != "npu":
        return None
    raise BackendUnavailableError(f"npu:{index} cannot be used", why=_NOT_YET, remedy=_NOT_YET_REMEDY)


def _obstacle() -> tuple[str, str]:
    if not any(path.name[len("davinci") :].isdigit() for path in _DEVICES.glob("davinci[0-9]*")):
        return (
            "there is no Ascend NPU (no /dev/davinci*)",
            "see what npu-smi info says",
        )
    if not os.environ.get("ASCEND_HOME_PATH"):
        return "CANN is not set up (ASCEND_HOME_PATH is not set)", "install CANN, and source its set_env.sh"
    try:
        version("torch-npu")
    except PackageNotFoundError:
        return "torch-npu is not installed", "pip install the torch-npu that fits your torch and CANN"
    return _NOT_YET, _NOT_YET_REMEDY

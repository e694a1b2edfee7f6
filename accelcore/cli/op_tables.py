"""What `accelcore precision` shows, found in a process that may import torch; it writes JSON to stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

from accelcore.errors import AccelError, BackendUnavailableError, ConfigurationError, UnknownBackendError

__all__ = ["main"]


def main() -> int:
    """Print O1's table, and torch's own for each backend that the arguments name."""
    answer: dict[str, Any] = {}
    try:
        answer["torch"] = {name: _torchs_table(name) for name in sys.argv[1:]}
    except AccelError as error:
        answer["error"] = [error.what, error.why, error.available, error.remedy]
    else:
        from accelcore.precision import O1

        answer["o1"] = {name: treatment.value for name, treatment in O1.items()}
    print(json.dumps(answer))  # noqa: T201
    return 0


def _torchs_table(name: str) -> dict[str, Any]:
    """The operators torch's autocast intercepts there, and where that is known from: the device, or torch alone."""
    from accelcore.selection import select

    try:
        backend = select(name)
    except (BackendUnavailableError, UnknownBackendError) as error:
        operators = _registered(name)
        if not operators:
            raise ConfigurationError(
                f"torch knows no autocast of {name!r} in this process", why=error.what, remedy=error.remedy
            ) from error
        return {"operators": operators, "source": "torch's dispatcher: no such device works here"}
    own = {operator: treatment.value for operator, treatment in backend.precision.treatments().items()}
    source = "EMULATED" if backend.emulated else "the device's backend"
    return {"operators": sorted(backend.precision.table("torch")), "source": source, "own": own}


def _registered(device_type: str) -> list[str]:
    import torch

    try:
        key = f"Autocast{torch._C._dispatch_key_for_device(device_type)}"
        return sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key))
    except RuntimeError:  # torch has no such device
        return []

"""The emulator's entry for `accelcore run --emulate npu`. This module does not import torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from accelcore.devices.hookspecs import hookimpl
from accelcore.errors import ConfigurationError
from accelcore_npu_emulator.bootstrap import environment
from accelcore_npu_emulator.settings import Settings


@hookimpl
def accelcore_emulate(name: str, devices: int) -> Mapping[str, str] | None:
    """Compile the emulated CANN. Return the variables of a process that uses it, with `devices` devices or more."""
    if name != "npu":
        return None
    settings = Settings.from_environment()
    if settings.devices < devices and "ACCEL_EMULATED_DEVICES" in os.environ:
        raise ConfigurationError(
            f"ACCEL_EMULATED_DEVICES={settings.devices} is less than the {devices} ranks need",
            remedy=f"unset it, or set it to {devices}",
        )
    return environment(replace(settings, devices=max(settings.devices, devices)))

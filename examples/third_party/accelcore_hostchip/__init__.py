"""accelcore on hostchip. This module must be light: no torch, no driver."""

import os

from accelcore import Probe, hookimpl


@hookimpl
def accelcore_probe():
    present = os.path.exists("/dev/null")  # your driver's file: find it, load nothing
    why = "" if present else "no /dev/null"
    return Probe("hostchip", present, why, remedy="load it", count=1, api=1)


@hookimpl
def accelcore_create_backend(name, index):
    if name != "hostchip":
        return None
    from accelcore_hostchip.backend import create  # only now is torch imported

    return create(index)


@hookimpl
def accelcore_register_optimizers(backend, registry):
    if backend.name == "hostchip":
        from accelcore_hostchip.lion import Lion

        registry.register("lion", "foreach", Lion, priority=10, memory="any")

"""An imaginary accelerator, played by the host. This module must be light."""

import os

from accelcore import Probe, hookimpl


@hookimpl
def accelcore_probe():
    present = os.path.exists("/proc/self/statm")  # find your driver, do not load it
    return Probe("hostchip", present, "needs /proc", remedy="use Linux", count=1)


@hookimpl
def accelcore_create_backend(name, index):
    if name != "hostchip":
        return None
    from accelcore_hostchip.backend import create  # only now is torch imported

    return create(index)

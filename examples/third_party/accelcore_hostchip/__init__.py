"""An imaginary accelerator, played by the host. This module is loaded to ask whether it works: keep it light."""

import os

from accelcore import Probe, hookimpl


@hookimpl
def accelcore_probe():
    present = os.path.exists("/proc/self/statm")  # look for your driver, without loading it
    return Probe("hostchip", available=present, reason="" if present else "no driver", remedy="use Linux", count=1)


@hookimpl
def accelcore_create_backend(name, index):
    if name != "hostchip":
        return None
    from accelcore_hostchip.backend import create  # only now is torch imported

    return create(index)

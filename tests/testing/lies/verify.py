"""What no assertion can catch: these are for `accelcore verify`."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading

import torch

from lies.lie import lie, replaced


class _Lost(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise RuntimeError("misaligned address\nand more")


def _in_float64(backend, act):
    def autocast(honest, dtype=None, **options):
        return act() if dtype == torch.float64 else honest.autocast(dtype, **options)

    return replaced(backend, "precision", autocast=autocast)


@lie("TestPrecision.test_autocast_refuses_other_dtypes", says="")
def device_that_crashes(backend):
    def crash():
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGSEGV)

    return _in_float64(backend, crash)


@lie("TestPrecision.test_autocast_refuses_other_dtypes", says="")
def device_that_hangs(backend):
    return _in_float64(backend, threading.Event().wait)


@lie("TestPrecision.test_autocast_refuses_other_dtypes", says="")
def device_that_is_lost(backend):
    """No kernel runs after that test, in its process."""
    return _in_float64(backend, _Lost().__enter__)


@lie("TestRuntime.test_memory", says="")
def device_that_ends_the_process(backend):
    os._exit(0)


@lie("TestRuntime.test_memory", says="the driver cannot be asked")
def memory_that_cannot_be_read(backend):
    def memory(honest):
        raise OSError("the driver cannot be asked")

    return replaced(backend, "runtime", memory=memory)

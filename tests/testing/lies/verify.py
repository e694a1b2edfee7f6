"""What no assertion can catch: these are for `accelcore verify`."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading

from lies.lie import lie, replaced


@lie("TestRuntime.test_memory", says="")
def device_that_crashes(backend):
    def memory(honest):
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGSEGV)

    return replaced(backend, "runtime", memory=memory)


@lie("TestRuntime.test_memory", says="")
def device_that_hangs(backend):
    return replaced(backend, "runtime", memory=lambda honest: threading.Event().wait())


@lie("TestRuntime.test_memory", says="")
def device_that_ends_the_process(backend):
    os._exit(0)


@lie("TestRuntime.test_memory", says="the driver cannot be asked")
def memory_that_cannot_be_read(backend):
    def memory(honest):
        raise OSError("the driver cannot be asked")

    return replaced(backend, "runtime", memory=memory)

"""Runs of the self-test's command, in forks of one process that has imported torch's operator samples: it takes 5 s."""

import contextlib
import io
import multiprocessing
import os

from accelcore_npu_emulator.selftest.__main__ import main


def commands(*runs):
    """The exit code and the output of each run: its arguments, and what it adds to the environment."""
    import torch.testing._internal.common_methods_invocations  # noqa: F401  # here: those who start this need none

    context = multiprocessing.get_context("fork")  # nothing here has touched the device, nor started a thread
    found = []
    for arguments, variables in runs:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(theirs, arguments, variables))
        process.start()
        theirs.close()
        found.append(ours.recv())
        process.join()
    return found


def _run(pipe, arguments, variables):
    os.environ.update(variables)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = main(arguments)
    pipe.send((code, output.getvalue()))

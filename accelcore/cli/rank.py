"""Program that runs the script of `accelcore run`.

Its arguments: the launcher's process id, or 0 without a launcher; the names of packages to hide, separated by commas;
then the arguments of `python`.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import runpy
import signal
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, TracebackType

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    """Run the script; an exception that ends a rank is recorded for torch's launcher."""
    launcher, packages, *sys.argv = sys.argv[1:]
    _end_with(int(launcher))
    _show_in_one_line(launched=bool(int(launcher)))
    sys.modules.update(dict.fromkeys(filter(None, packages.split(","))))  # type: ignore[arg-type]  # None: not found
    run = script_of_arguments()
    try:
        run()
    except Exception as error:  # noqa: BLE001  # shown as Python would, without the frames of this file and runpy
        sys.last_value = error  # Python sets it: a job then leaves without waiting
        if int(launcher):
            _record(error)
        trace = error.__traceback__
        while trace is not None and ("runpy" in (file := trace.tb_frame.f_code.co_filename) or file == __file__):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def script_of_arguments() -> Callable[[], object]:
    """Return the function that runs what `sys.argv` names, a script or `-m` and a module, as `python` would."""
    module = sys.argv[0] == "-m"
    if module:
        del sys.argv[0]
    script = sys.argv[0]
    if not getattr(sys.flags, "safe_path", False):  # Python has put the folder of the program there
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(script))
    if module:
        return partial(runpy.run_module, script, run_name="__main__", alter_sys=True)
    if script.endswith(".py"):
        return partial(_run_file, os.path.abspath(script))
    return partial(runpy.run_path, script, run_name="__main__")


def _run_file(path: str) -> None:
    """Run a file as the module `__main__`, which stays when the script has ended: threads may still pickle from it."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = path  # absolute, as Python sets it: a script may leave its folder
    with io.open_code(path) as file:
        exec(compile(file.read(), path, "exec"), vars(module))  # noqa: S102  # the script that the user named


def _show_in_one_line(*, launched: bool) -> None:
    """Let Ctrl-C and the loss of another rank end the script with one line, unless the script handles them.

    For its ranks, a launcher writes the line of Ctrl-C. Python ends the process by SIGINT, which shells show as 130.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # One with a cause names the rank that was lost. Without a traceback it comes from a job's own hook.
        names_rank = kind.__name__ == "DistributedError" and (trace is None or error.__cause__ is not None)
        if names_rank and launched:
            if trace is None:
                _record(error)  # in place of the error that it explains; the launcher shows all of it
            sys.stderr.write(f"{kind.__name__}: {error}".partition("\n")[0] + "\n")
        elif not issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        elif launched:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher sends it again
        else:
            sys.stderr.write("accelcore: interrupted\n")

    sys.excepthook = hook  # before the script: torch's process group wraps the hook that it finds


def _record(error: BaseException) -> None:
    """Do what torch's `record` does; imported late, because a script may set variables before it imports torch."""
    with contextlib.suppress(Exception):  # torch may be what is broken
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def _end_with(launcher: int) -> None:
    """Have Linux kill this rank if the launcher is killed. A launcher that ends in order ends its ranks itself."""
    if launcher and sys.platform == "linux":
        # Not SIGTERM: a script may answer it by saving a checkpoint, which needs the other ranks.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:
            sys.exit("accelcore: the launcher ended before this rank began")


if __name__ == "__main__":
    main()

"""`accelcore run`: the environment for a script, and then the script in this very process, or torch's launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from accelcore.autoload import VARIABLE, Autoload, autoloads, of_unusable_backends
from accelcore.choices import Choice, parse
from accelcore.cli import elastic, without
from accelcore.cli.stand_in import apex_path
from accelcore.entrypoints import declared
from accelcore.environment import requested_device, shown
from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.failure_report import LAUNCHER
from accelcore.plugins import Candidate

__all__ = ["run"]


def run(
    script: str,
    arguments: Sequence[str],
    *,
    module: bool = False,
    device: str | None = None,
    nproc: int = 1,
    machines: elastic.Machines | None = None,
    max_restarts: int = 0,
    check_collectives: bool = False,
    emulate: str | None = None,
    apex: bool = False,
) -> NoReturn:
    """Become the script; everything that can be a mistake is found before that.

    A restart is torch's launcher's work too, so that it is used for one rank where restarts are asked for.

    Args:
        machines: the job's, where it has several.

    Raises:
        ConfigurationError: `device`, or ACCEL_DEVICE, is outside the grammar of `select()`; or the script is not there;
            or it has an apex of its own, and `apex` gives it one.
        UnknownBackendError: `device` is one backend that nothing installed offers.
        UnsupportedError: nothing installed emulates the backend that `emulate` names.
    """
    environ = dict(os.environ)
    program = ["-m", script, *arguments] if module else [script, *arguments]
    if device is not None:
        from accelcore.selection import check_installed

        check_installed(device, "--device")  # else each rank would fail, and speak of ACCEL_DEVICE
        environ["ACCEL_DEVICE"] = device
    elif (asked := requested_device()) is not None:
        parse(asked, "ACCEL_DEVICE")
    launched = nproc > 1 or max_restarts > 0 or machines is not None
    if not module:
        _check(script, launched)
    if check_collectives:
        if nproc == 1 and machines is None:
            raise ConfigurationError(
                "--check-collectives needs a job of several ranks", remedy="leave it out, or say --nproc 2"
            )
        environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    if emulate is not None:
        environ.update(_emulation(emulate, nproc))
        sys.stderr.write(
            f"accelcore: EMULATED: {emulate} is imitated on the host; its speed and numerics prove nothing\n"
        )
    elif VARIABLE not in environ:
        failing = _autoloads_that_would_fail()
        if failing:
            environ[VARIABLE] = "0"
            hidden = ""
            if module or script != "-":  # stdin is read by Python alone
                packages = ",".join(dict.fromkeys(autoload.package for autoload, _ in failing))
                program = [without.__file__, packages, *program]
                hidden = f"; {packages} is hidden from it"
            sys.stderr.write(f"accelcore: {VARIABLE}=0 for this run, because {_reasons(failing)}{hidden}\n")
    if apex:
        environ["PYTHONPATH"] = apex_path(environ, Path.cwd() if module or script == "-" else Path(script).parent)
    command = [sys.executable, *program]
    if launched:
        command = [sys.executable, *elastic.arguments(nproc, max_restarts, machines), *program]
        # torch 2.13 keeps one store over restarts, in which gloo finds the addresses of ranks that are gone: every
        # other restart fails or hangs. With this, each start has a store of its own.
        environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        environ[LAUNCHER] = str(os.getpid())  # which is about to become it
    if nproc > 1:
        # Each would take all cores; torch's launcher would give each a single one, and say so at length.
        environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // nproc)))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not a child: signals, exit code, terminal and process id are the script's own, and nothing is left to clean up.
    os.execve(sys.executable, command, environ)  # noqa: S606


def _cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(script: str, launched: bool) -> None:
    if script == "-":
        if launched:
            raise ConfigurationError(
                "several ranks, or restarts, of a script from stdin",
                why="stdin can be read once only",
                remedy="put the script in a file",
            )
    elif not Path(script).exists():
        raise ConfigurationError(
            f"there is no script {shown(script, 200)}",
            why=f"no such file in {Path.cwd()}" if not Path(script).is_absolute() else "no such file",
            remedy="correct the path; a module goes behind -m",
        )


def _emulation(name: str, devices: int) -> Mapping[str, str]:
    from accelcore import plugins

    one = parse(name, "--emulate") == (Choice(name),)
    variables = plugins.emulate(name, devices) if one else None
    if variables is None:
        raise UnsupportedError(
            f"--emulate {shown(name)}: nothing installed emulates a backend of that name",
            available=", ".join(entry.name for entry in declared(plugins.EMULATORS)) or "no emulator is installed",
            remedy=f"install the package that emulates {name}, if there is one; docs/install.md lists accelcore's own"
            if one
            else "name one backend, and no device",
        )
    return variables


def _autoloads_that_would_fail() -> list[tuple[Autoload, Candidate]]:
    """The runtimes that `import torch` must not load, with their backends. Plugins are asked only if there is any."""
    found = autoloads()
    if not found:
        return []
    from accelcore.cli.ask_plugins import ask_plugins  # in a process of its own: this one is about to become the script

    return of_unusable_backends(found, ask_plugins()[0].candidates)


def _reasons(failing: Iterable[tuple[Autoload, Candidate]]) -> str:
    return "; ".join(
        f"import torch would load {autoload}, and {candidate.name} is not usable here: {candidate.probe.reason}"
        for autoload, candidate in failing
    )

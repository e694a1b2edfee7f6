"""`accelcore run`: prepare the script's environment, then become the script, or torch's launcher that starts ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn, TypeVar, cast

import click
from click.core import ParameterSource

from accelcore.cli import rank
from accelcore.cli.options import check_script, common, device_option, nproc_option, number, script_arguments
from accelcore.devices import plugins
from accelcore.devices.plugins import AUTOLOAD, EMULATORS, Declared, declared, describe_error, hooks_of, only_one
from accelcore.devices.request import requested_device
from accelcore.devices.select import check_installed, rank_count
from accelcore.errors import ConfigurationError, PluginError, UnsupportedError
from accelcore.util.text import shown

_LAUNCHER = "accelcore.cli.launcher"  # not imported: it imports torch
_APEX = Path(__file__).parents[1] / "apex" / "stand_in"
_GIVEN = ParameterSource.COMMANDLINE

F = TypeVar("F", bound=Callable[..., object])

_SEVERAL_MACHINES = {
    "--nnodes": ("N", "How many machines the job has; run the command on each."),
    "--node-rank": ("K", "The number of this machine, counted from 0."),
    "--rdzv-endpoint": ("HOST:PORT", "Where the machines meet: machine 0, and a port that is free there."),
    "--rdzv-backend": ("NAME", "static, the default, or c10d, which can restart ranks on several machines."),
    "--rdzv-id": ("ID", "The job's name, if several jobs meet at one endpoint."),
    "--rdzv-conf": ("KEY=VALUE,...", "Further settings of the rendezvous."),
    "--master-addr": ("HOST", "Machine 0, if --rdzv-endpoint is not given."),
    "--master-port": ("PORT", "A port that is free there."),
    "--local-addr": ("HOST", "The address of this machine, if torch does not find the right one."),
}
"""Options of torchrun that are passed through."""


def _several_machines(command: F) -> F:
    for name, (metavar, text) in reversed(_SEVERAL_MACHINES.items()):
        command = click.option(name, metavar=metavar, help=f"{text} (torchrun's)")(command)
    return command


@click.command(context_settings={"allow_interspersed_args": False})  # options after the script are the script's own
@device_option(
    "--device",
    "DEVICE",
    "What select() chooses in the script, as ACCEL_DEVICE does: NAME, NAME:INDEX, a list, or auto.",
)
@nproc_option("Several are started by torch's elastic launcher.")
@number("--max-restarts", "K", 0, "How often all ranks are started again after one has died.", least=0)
@_several_machines
@device_option(
    "--emulate", "NAME", "Run on an emulation of the backend NAME, on this host; its emulator must be installed."
)
@click.option("--apex", is_flag=True, help="Let `import apex` in the script and its ranks find accelcore.apex.")
@script_arguments
@common
def run(
    script: str,
    arguments: tuple[str, ...],
    *,
    module: bool,
    device: str | None,
    nproc: int,
    max_restarts: int,
    emulate: str | None,
    apex: bool,
    **options: str | None,
) -> NoReturn:
    """Run a script or a module on a device, with one or more ranks.

    Options of accelcore go before SCRIPT, the script's own after it: in `accelcore run train.py --device cpu` the
    script gets --device. With one rank this process becomes the script,
    with its exit code and its signals. If one of several ranks fails, all end, and the last line names the first.

    \b
    Examples:
      accelcore run train.py --epochs 3
      accelcore run --device cpu train.py
      accelcore run --device npu,cuda,cpu -m mypackage.train
      accelcore run --nproc auto train.py
      accelcore run --nproc 2 --max-restarts 1 train.py
      accelcore run --nproc 8 --nnodes 2 --node-rank 0 --rdzv-endpoint node0:29400 train.py
      accelcore run --emulate npu --device npu train.py
      accelcore run --apex train.py
    """
    _warn_of_late_options(arguments)
    given = ((name, options[name[2:].replace("-", "_")]) for name in _SEVERAL_MACHINES)
    machines = {name: value for name, value in given if value is not None}
    environ = dict(os.environ)
    program = ["-m", script, *arguments] if module else [script, *arguments]
    emulator = None if emulate is None else _emulator(emulate)
    if device:  # an empty one counts as unset, as in ACCEL_DEVICE and select()
        environ["ACCEL_DEVICE"] = device
    elif (asked := requested_device()) is not None:
        check_installed(asked, "ACCEL_DEVICE")
    nproc = _number_of_ranks(nproc, device, emulated=emulate is not None)
    if machines:
        _check_machines(machines, environ)
    launched = nproc > 1 or max_restarts > 0 or bool(machines)
    if not module and not Path(script, "__main__.py").exists():  # Python runs a folder with that
        check_script(script)
    elif module and not ((top := script.partition(".")[0]) and (PathFinder.find_spec(top, [""]) or find_spec(top))):
        why, remedy = f"Python finds no {top!r}, seen from {Path.cwd()}", "correct the name, or install its package"
        raise ConfigurationError(f"there is no module {shown(script)}", why=why, remedy=remedy)
    hidden = ""
    if emulator is not None:
        environ.update(_emulation(emulator, nproc))
        sys.stderr.write(
            f"accelcore: EMULATED: {emulate} is imitated on the host; its speed and numerics prove nothing\n"
        )
    elif AUTOLOAD not in environ:
        hidden = _turn_off_autoload(environ)
    if apex:
        folder = Path.cwd() if module else Path(script).parent
        environ["PYTHONPATH"] = _apex_path(environ, folder)
    if launched:
        command = _launcher(nproc, max_restarts, machines, hidden, program, environ)
    else:
        command = [sys.executable, rank.__file__, "0", hidden, *program]
    sys.stdout.flush()
    sys.stderr.flush()
    # No child process: signals, exit code, terminal and process id are the script's own.
    os.execve(sys.executable, command, environ)  # noqa: S606


def _warn_of_late_options(arguments: Sequence[str]) -> None:
    """Warn of words after the script that are options of `accelcore run`; the script may have options of that name.

    One that also stands before the script is not reported: both were written on purpose.
    """
    context = click.get_current_context()
    unset = (it for it in context.command.params if context.get_parameter_source(it.name or "") is not _GIVEN)
    own = {name for option in unset if option.expose_value for name in option.opts}
    late = [name for name in (word.partition("=")[0] for word in arguments) if name.startswith("--") and name in own]
    if late:
        sys.stderr.write(f"accelcore: the script gets {', '.join(late)}: options of accelcore go before the script\n")


def _number_of_ranks(nproc: int, device: str | None, *, emulated: bool) -> int:
    """Return how many ranks to start here, 0 being auto; raise if the devices asked for do not suffice."""
    if emulated:
        if device:
            check_installed(device, "--device")  # else each rank would fail, with an error about ACCEL_DEVICE
        if nproc == 0:
            raise ConfigurationError(
                "--nproc auto cannot be combined with --emulate", remedy="give the number of ranks: --nproc 2"
            )
        return nproc
    if nproc == 1 and not device:
        return 1
    source = "--device" if device else "ACCEL_DEVICE"
    return rank_count(device or requested_device() or "auto", source, nproc or None)


def _launcher(
    nproc: int,
    restarts: int,
    machines: Mapping[str, str],
    hidden: str,
    program: Sequence[str],
    environ: MutableMapping[str, str],
) -> list[str]:
    """Return the command of torch's launcher that starts the ranks, and add to `environ` what they need."""
    if restarts:
        # torch 2.13 keeps one store over restarts, in which gloo finds the addresses of ranks that have ended: every
        # other restart fails or hangs. With this, each start has a store of its own, which ends with its rank 0.
        environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if nproc > 1:
        # Otherwise each rank would use all cores; torch's launcher would give each one core, with a long warning.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    # This process becomes the launcher, so that its id is the launcher's. A rank's output is not buffered, or what
    # it printed would be lost if it is killed. "--": else torch reads options of the script that resemble its own.
    meeting = [word for option in machines.items() for word in option] or ["--standalone"]
    ranks = ["--nproc-per-node", str(nproc), "--max-restarts", str(restarts), "--no-python", "--"]
    each = [sys.executable, "-u", rank.__file__, str(os.getpid()), hidden, *program]
    return [sys.executable, "-m", _LAUNCHER, *meeting, *ranks, *each]


def _check_machines(machines: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """Raise if an option is missing without which torchrun would start a job on this machine alone."""
    needed = [("--nnodes",), ("--rdzv-endpoint", "--master-addr")]
    if machines.get("--rdzv-backend", "static") == "static":
        needed.append(("--node-rank",))
    for options in needed:
        variables = ("PET_" + option[2:].replace("-", "_").upper() for option in options)  # torchrun reads these, too
        if not any(option in machines for option in options) and not any(name in environ for name in variables):
            raise ConfigurationError(
                f"{' and '.join(machines)} cannot be used without {' or '.join(options)}",
                why="a job of several machines needs their number, a meeting point, and the number of this machine",
                remedy="give --nnodes 2 --node-rank 0 --rdzv-endpoint HOST:PORT; another --node-rank on each machine; "
                "with --rdzv-backend c10d, torch numbers the machines",
            )


def _emulator(name: str) -> Declared:
    """Return the installed emulator of the backend `name`."""
    emulators = declared(EMULATORS)
    offers = [entry for entry in emulators if entry.name == name]
    if not offers:
        names = ", ".join(sorted({entry.name for entry in emulators}))
        advice = (f"choose an available one ({names})" if names else "install its emulator") + ", or remove --emulate"
        for own in (entry for entry in declared("accelcore.own_emulators") if entry.name == name):
            both = f"./plugins/{name} ./plugins/{own.package.removeprefix('accelcore_')}"
            advice = f"in a clone of accelcore: pip install {both}; then python -m {own.value}"
        raise UnsupportedError(
            f"--emulate {shown(name)}: no installed package emulates a backend of that name",
            available=names or "no emulator is installed",
            remedy="name one backend without an index" if ":" in name else advice,
        )
    return only_one(offers, f"an emulation of {name!r}")


def _emulation(offer: Declared, devices: int) -> Mapping[str, str]:
    """Return the environment in which an installed emulator imitates its backend. May take long."""
    what, remedy = f"the emulator of {offer.name!r} ({offer.label})", f"repair or uninstall {offer.label}"
    try:
        hooks = hooks_of(offer.point)
    except Exception as error:
        raise PluginError(f"{what} is broken", why=describe_error(error), remedy=remedy) from error
    variables = hooks.accelcore_emulate(name=offer.name, devices=devices)
    if variables is None:
        raise PluginError(f"{what} does not answer accelcore_emulate", remedy=remedy)
    return cast("Mapping[str, str]", variables)


def _turn_off_autoload(environ: MutableMapping[str, str]) -> str:
    """Keep `import torch` from loading the runtimes of unusable backends; return the packages to hide."""
    found = plugins.autoloads()
    if not found:
        return ""
    from accelcore.cli.doctor.ask_plugins import ask_plugins

    # In another process: this one is about to become the script.
    failing = plugins.autoloads_of_unusable_backends(found, ask_plugins().candidates)
    if not failing:
        return ""
    environ[AUTOLOAD] = "0"
    hidden = ",".join(dict.fromkeys(autoload.package for autoload, _ in failing))
    reasons = "; ".join(
        f"import torch would load {autoload}, and {candidate.name} is not usable here: {candidate.probe.reason}"
        for autoload, candidate in failing
    )
    sys.stderr.write(f"accelcore: {AUTOLOAD}=0 for this run, because {reasons}; {hidden} is hidden from it\n")
    return hidden


def _apex_path(environ: Mapping[str, str], folder: Path) -> str:
    """Return the PYTHONPATH with which `import apex` finds accelcore.apex; warn if this hides another apex.

    An apex in `folder`, which Python searches first, is an error.
    """
    beside = next((path for path in (folder / "apex.py", folder / "apex" / "__init__.py") if path.exists()), None)
    if beside is not None:
        raise ConfigurationError(
            "--apex cannot replace the apex beside the script",
            why=f"Python finds {beside} first",
            remedy="rename that one, or remove --apex",
        )
    spec = find_spec("apex")
    if spec is not None and spec.origin is not None and not Path(spec.origin).is_relative_to(_APEX):
        sys.stderr.write(f"accelcore: --apex: the script imports accelcore.apex, not the installed {spec.origin}\n")
    return os.pathsep.join(filter(None, (str(_APEX), environ.get("PYTHONPATH"))))

"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from accelcore.errors import ConfigurationError

__all__ = [
    "SEVERAL_MACHINES",
    "check_script",
    "common",
    "device_option",
    "devices",
    "json_option",
    "number",
    "rank_count_option",
    "several_machines",
]

F = TypeVar("F", bound=Callable[..., object])

SEVERAL_MACHINES = {
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
"""Options of torchrun that `accelcore run` passes through."""


class _RankCount(click.IntRange):
    """A whole number, or `auto`, which becomes 0."""

    name = "whole number"  # for messages

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return 0 if value == "auto" else super().convert(value, param, ctx)


def _debug(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    context.obj.debug = context.obj.debug or value


# `--debug` is eager: it is read before another option raises.
common = click.option(
    "--debug", is_flag=True, is_eager=True, expose_value=False, callback=_debug, help="Show tracebacks of errors."
)
rank_count_option = click.option(
    "--nproc",
    metavar="N",
    type=_RankCount(min=1),
    default=1,
    show_default=True,
    help="How many ranks to start on this machine, or auto: one for each device. More than 1 through torch's elastic "
    "launcher.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def number(
    name: str, metavar: str, default: int, help: str, *, least: int = 1, most: int | None = None
) -> Callable[[F], F]:
    """Add an option whose value is a whole number."""
    kind = click.IntRange(min=least, max=most)
    kind.name = "whole number"  # for messages
    return click.option(name, metavar=metavar, type=kind, default=default, show_default=True, help=help)


def several_machines(command: F) -> F:
    """Add torchrun's options for several machines."""
    for name, (metavar, text) in reversed(SEVERAL_MACHINES.items()):
        command = click.option(name, metavar=metavar, help=f"{text} (torchrun's)")(command)
    return command


def devices(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete the names of installed backends, from their metadata: no plugin is loaded."""
    from accelcore.devices.plugins import BACKENDS, declared

    names = {"auto", *(entry.name for entry in declared(BACKENDS))}
    return sorted(name for name in names if name.startswith(incomplete.lower()))


def device_option(name: str, metavar: str, help: str) -> Callable[[F], F]:
    """Add an option whose value is a backend's name, which the shell completes."""
    return click.option(name, metavar=metavar, shell_complete=devices, help=help)


def check_script(script: str) -> None:
    """Raise ConfigurationError if there is no such file."""
    if not Path(script).is_file():
        raise ConfigurationError(f"there is no script {script!r}", remedy="correct the path")

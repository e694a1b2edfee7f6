"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from accelcore.errors import ConfigurationError, nearest
from accelcore.util.text import shown

F = TypeVar("F", bound=Callable[..., object])


def _debug(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    context.obj.debug = context.obj.debug or value


# `--debug` is eager: it is read before another option raises.
common = click.option(
    "--debug", is_flag=True, is_eager=True, expose_value=False, callback=_debug, help="Show tracebacks of errors."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def number(
    name: str, metavar: str, default: int, help: str, *, least: int = 1, most: int | None = None
) -> Callable[[F], F]:
    """Add an option whose value is a whole number."""
    kind = click.IntRange(min=least, max=most)
    kind.name = "whole number"  # for messages
    return click.option(name, metavar=metavar, type=kind, default=default, show_default=True, help=help)


class _RankCount(click.IntRange):
    """A whole number, or `auto`, which becomes 0."""

    name = "number of ranks: a whole number, or auto"  # for messages

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return 0 if value == "auto" else super().convert(value, param, ctx)


def nproc_option(more: str = "") -> Callable[[F], F]:
    """Add the option `--nproc`; 0 is `auto`."""
    text = f"How many ranks to start on this machine, or auto: one for each device. {more}".strip()
    return click.option("--nproc", metavar="N", type=_RankCount(min=1), default=1, show_default=True, help=text)


def script_arguments(command: F) -> F:
    """Add what follows the other options of a command: `-m`, the script, and the script's own arguments."""
    command = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)(command)
    command = click.argument("script", type=click.Path())(command)
    return click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")(command)


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
    path, is_option = Path(script), script.startswith("-")
    is_folder = bool(script) and path.is_dir()
    if is_folder or not script or not path.exists():  # a pipe, as of a shell's <(...), is one
        near = nearest(path.stem, (other.stem for other in path.parent.glob("*.py")))
        raise ConfigurationError(
            f"there is no script {shown(script, 200)}",
            why="it is a folder" if is_folder else f"there is no such file, seen from {Path.cwd()}",
            remedy="write options of accelcore before the first argument: options after the script are the script's"
            if is_option
            else (f"did you mean {path.with_name(near)}.py? Else " if near else "")
            + "correct the path, or give a module with -m",
        )

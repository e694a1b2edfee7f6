"""What several commands have in common: options, and the completion of devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

__all__ = ["common", "devices", "timeout"]

F = TypeVar("F", bound=Callable[..., object])


def _debug(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    context.obj.debug = context.obj.debug or value


def common(command: F) -> F:
    """Give a command the options that all have."""
    # Eager: known before another option turns out to be a mistake.
    return click.option(
        "--debug", is_flag=True, is_eager=True, expose_value=False, callback=_debug, help="Show tracebacks of errors."
    )(command)


def timeout(default: int, help: str) -> Callable[[F], F]:
    """An option `--timeout`, in seconds."""
    seconds = click.IntRange(min=1, max=86400)
    return click.option("--timeout", metavar="SECONDS", type=seconds, default=default, show_default=True, help=help)


def devices(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The installed backends whose names begin so, for completion."""
    from importlib.metadata import entry_points

    from accelcore.plugins import BACKENDS

    names = {"auto", *(point.name for point in entry_points(group=BACKENDS))}  # by their metadata: nothing is loaded
    return sorted(name for name in names if name.startswith(incomplete.lower()))

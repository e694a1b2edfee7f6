"""Commands that other distributions bring, by entry points of the group `accelcore.commands`.

The value of such an entry point is a `click.Command`. `accelcore --help` lists the commands from metadata. A
distribution is imported when one of its commands runs. A command of accelcore itself takes precedence over one that
another distribution brings by the same name.
"""

from __future__ import annotations

from typing import Any

import click

from accelcore.errors import ConfigurationError, PluginError
from accelcore.util.text import nearest

__all__ = ["COMMANDS", "Commands"]

COMMANDS = "accelcore.commands"
"""Group of entry points: the name of a command, and a `click.Command`."""

_OFFERED = {
    "lint": ("lint", "Find what ties a training script to one device, or is wrong on any device."),
    "port": ("lint", "Rewrite a training script so that it runs on every device."),
}
"""Commands of accelcore's own distributions: the extra that installs it, and the line that `--help` shows."""


class Commands(click.Group):
    """Group of accelcore's commands and of those that other distributions bring."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        from accelcore.devices.plugins import declared

        return sorted({*super().list_commands(ctx), *_OFFERED, *(entry.name for entry in declared(COMMANDS))})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in self.list_commands(ctx):
            return own
        return _Brought(cmd_name, short_help=_line(cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            known = {name: name for name in self.list_commands(ctx)} | {"version": "--version", "help": "--help"}
            near = nearest(args[0], known)
            hint = f" Did you mean 'accelcore {known[near]}'?" if near else ""
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx) from error


class _Brought(click.Command):
    """Stand-in for a command of another distribution, which is imported when the command is run or completed."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        assert self.name is not None, "the group names it"
        return _load(self.name).make_context(info_name, args, parent, **extra)


def _line(name: str) -> str:
    from accelcore.devices.plugins import declared

    if name in _OFFERED:
        return _OFFERED[name][1]
    return "A command of " + " and ".join(entry.label for entry in declared(COMMANDS) if entry.name == name)


def _load(name: str) -> click.Command:
    from accelcore.devices.plugins import declared, describe

    offers = [entry for entry in declared(COMMANDS) if entry.name == name]
    labels = " and ".join(entry.label for entry in offers)
    if not offers:
        extra = _OFFERED[name][0]
        raise ConfigurationError(
            f"the command {name!r} is not installed",
            why=f"accelcore-{extra} brings it",
            remedy=f"pip install 'accelcore[{extra}]', or pip install ./plugins/{extra} in a clone of accelcore",
        )
    if len(offers) > 1:
        raise PluginError(f"two distributions bring the command {name!r}: {labels}", remedy="uninstall one of them")
    remedy = f"repair or uninstall {labels}"
    try:
        command = offers[0].point.load()
    except Exception as error:
        raise PluginError(f"the command {name!r} of {labels} is broken", why=describe(error), remedy=remedy) from error
    if not isinstance(command, click.Command):
        raise PluginError(f"the command {name!r} of {labels} is {command!r}, not a click.Command", remedy=remedy)
    return command

"""Base of the commands of this distribution: what `accelcore lint` and `accelcore-lint` have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

FINDINGS = 1
"""Exit code of a run that found something; `lint` also counts a file that cannot be read or parsed."""

FAILED = 2
"""Exit code of `port` if a file could not be ported, or if the losses of script and port differ."""

USAGE = 64
"""Exit code of an invalid request, as of all commands of accelcore."""


class PathArgument(click.Path):
    """A path; an empty one, as of an unset variable, is refused, because it would mean the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if value == "":
            self.fail("a path is empty: name a file or a folder, or . for this folder", param, ctx)
        return Path(value)


class Command(click.Command):
    """Command with the same exit codes, whichever program runs it.

    A mistake of the user is one message on stderr and the exit code `USAGE`. Raise `click.ClickException` for it.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.ClickException as error:
            if ctx.resilient_parsing:
                raise
            _show(error, ctx)
            ctx.exit(USAGE)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            _show(error, ctx)
            ctx.exit(USAGE)


def _show(error: click.ClickException, ctx: click.Context) -> None:
    """Show an error as the program that runs shows its own; an error of usage as click does."""
    if isinstance(error, click.UsageError):
        error.show()
    else:
        click.echo(f"{ctx.find_root().info_name}: {error.format_message()}", err=True)

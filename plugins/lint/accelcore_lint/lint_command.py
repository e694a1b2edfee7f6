"""The command `lint`: `accelcore-lint`, and `accelcore lint` where accelcore is installed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import click

from accelcore_lint.command import Command

__all__ = ["lint", "main"]


@click.command(cls=Command)
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
def lint(paths: tuple[Path, ...]) -> int:
    """Find lines that tie a training script to one device, or train wrongly on any device.

    \b
    Examples:
      accelcore lint train.py
    """  # noqa: D301  # click reads the backspace: what follows keeps its lines
    for path in paths:
        try:
            ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError) as error:
            raise click.ClickException(f"{path} cannot be linted: {error}") from error
    return 0


def main() -> None:
    """Run `accelcore-lint`."""
    sys.exit(lint.main(prog_name="accelcore-lint", standalone_mode=False))


if __name__ == "__main__":
    main()

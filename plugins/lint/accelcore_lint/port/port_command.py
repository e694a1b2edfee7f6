"""The command `accelcore port`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
import libcst as cst
from rich.console import Console

from accelcore_lint.command import ERROR, FINDINGS, Command
from accelcore_lint.port.files import FileError, find_scripts, read_script, write_script
from accelcore_lint.port.model import Level
from accelcore_lint.port.report import Ported, as_json, diff, show
from accelcore_lint.port.rewrite import UnfaithfulError, port_source

__all__ = ["main", "port"]


@click.command(cls=Command)
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--level",
    type=click.Choice([level.value for level in Level]),
    default=Level.ROLES.value,
    show_default=True,
    help="torch: torch.accelerator, without accelcore. roles: accelcore in your own loop. trainer: also its trainer.",
)
@click.option("--diff", "show_diff", is_flag=True, help="Print the changes as a diff, and the summary on stderr.")
@click.option("--write", is_flag=True, help="Replace the files.")
@click.option("--json", "json_output", is_flag=True, help="Print the summary as JSON.")
def port(paths: tuple[Path, ...], level: str, show_diff: bool, write: bool, json_output: bool) -> int:
    """Rewrite training scripts for one vendor's device so that they run on every device.

    Only what is certain is rewritten. A line that is not gets a comment `# TODO(accelcore): ...` above it, and stands
    in the summary with its number. Without --write no file is changed.

    The exit code is 0 if nothing is left to do by hand, 1 if something is, 2 if a file could not be ported.

    \b
    Examples:
      accelcore port train.py                       what would be rewritten, and what is left
      accelcore port train.py --level torch --diff  for torch.accelerator, as a diff
      accelcore port src scripts --write            all files of two folders
    """  # noqa: D301  # click reads the backspace: what follows keeps its lines
    if show_diff and json_output:
        raise click.UsageError("--diff and --json both write to stdout: give one of them")
    chosen = Level(level)
    try:
        found = list(find_scripts(paths))
    except FileError as error:
        raise click.ClickException(str(error)) from error
    files = [_ported(path, chosen, paths if write else None) for path in found]
    if show_diff:
        for ported in files:
            click.echo(diff(ported), nl=False)
    if json_output:
        click.echo(json.dumps(as_json(files, chosen), indent=2))
    else:
        show(files, chosen, Console(stderr=show_diff, soft_wrap=True))
    if any(ported.outcome is None for ported in files):
        return ERROR
    return FINDINGS if any(ported.outcome and ported.outcome.left for ported in files) else 0


def _ported(path: Path, level: Level, within: tuple[Path, ...] | None) -> Ported:
    """Port one file, and replace it if `within` is given. An error is part of the result: other files go on."""
    try:
        script = read_script(path)
        outcome = port_source(script.source, level)
        if within is not None and outcome.source != script.source:
            write_script(script, outcome.source, within)
    except cst.ParserSyntaxError as error:
        return Ported(path, error=f"line {error.raw_line} is not Python that can be read: {error.message}")
    except (FileError, UnfaithfulError) as error:
        return Ported(path, error=str(error))
    return Ported(path, script.source, outcome)


def main() -> None:
    """Run `accelcore-port`."""
    sys.exit(port.main(prog_name="accelcore-port", standalone_mode=False))


if __name__ == "__main__":
    main()

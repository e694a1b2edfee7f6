"""The command `accelcore port`."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import libcst as cst
from rich.console import Console

from accelcore_lint.command import FAILED, FINDINGS, Command, PathArgument
from accelcore_lint.port.check import compare
from accelcore_lint.port.files import FileError, find_scripts, read_script, write_script
from accelcore_lint.port.project import Known, Project, read_project
from accelcore_lint.port.report import Ported, as_json, diff, show
from accelcore_lint.port.rewrite import Outcome, UnfaithfulError, parsed, port_source
from accelcore_lint.port.rule import Level
from accelcore_lint.port.vendors import lines_kept

_ASYNC = re.compile(r"[(,]\s*async *=")
_GLUED = re.compile(r"\b(assert|return|not|if|elif|while|in|and|or)\((?=[^\n]*\bif\b[^\n]*\belse\b|lambda\b)")
"""Words without a space before a choice or a function in parentheses, which libcst refuses."""
_SCRIPT = "accelcore_lint.port.arguments"


class _PortCommand(Command):
    """Command whose arguments after `--` are those of the script that `--check` runs."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            end = args.index("--")
            ctx.meta[_SCRIPT] = args[end + 1 :]
            args = args[:end]
        return super().parse_args(ctx, args)


@click.command(cls=_PortCommand, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("paths", nargs=-1, required=True, type=PathArgument())
@click.option("--check", is_flag=True, help="Run one script and its port on the CPU, and compare their losses.")
@click.option(
    "--steps",
    metavar="N",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="How many losses --check compares.",
)
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
@click.pass_context
def port(
    context: click.Context,
    paths: tuple[Path, ...],
    check: bool,
    steps: int,
    level: str,
    show_diff: bool,
    write: bool,
    json_output: bool,
) -> int:
    """Rewrite training scripts for one vendor's device so that they run on every device.

    It changes only lines that it is certain of. The others get a comment `# TODO(accelcore): ...`, and the summary
    lists them with their numbers. Without --write no file is changed.

    \b
    Exit code:
      0   nothing is left to do by hand; with --check, the losses are the same
      1   something is left; with --check, there was nothing to compare
      2   a file could not be ported; with --check, the losses differ
      64  the request is invalid

    \b
    Examples:
      accelcore port train.py                       what would be rewritten, and what is left
      accelcore port train.py --level torch --diff  for torch.accelerator, as a diff
      accelcore port src scripts --write            all files of two folders
      accelcore port train.py --check -- --lr 0.1   compare the losses of the script and of its port
    """
    if show_diff and json_output:
        raise click.UsageError("--diff and --json both write to stdout: give one of them")
    chosen = Level(level)
    arguments = context.meta.get(_SCRIPT)
    if check:
        return _check(paths, chosen, steps, arguments or ())
    if arguments is not None:
        raise click.UsageError("arguments after -- are those of the script that --check runs: give --check, too")
    try:
        found = list(find_scripts(paths))
    except FileError as error:
        raise click.ClickException(str(error)) from error
    project = read_project(found)
    files = [_written(ported, paths) if write else ported for ported in ported_together(found, chosen, project, paths)]
    if show_diff:
        for ported in files:
            click.echo(diff(ported), nl=False)
    if json_output:
        click.echo(json.dumps(as_json(files, chosen, project.mac), indent=2))
    else:
        show(files, chosen, Console(stderr=show_diff, soft_wrap=True), project.mac, written=write)
    if any(ported.outcome is None for ported in files):
        return FAILED
    return FINDINGS if any(ported.outcome and ported.outcome.left for ported in files) else 0


def _check(paths: tuple[Path, ...], level: Level, steps: int, arguments: Sequence[str]) -> int:
    """Compare one script with its port."""
    if len(paths) != 1 or not paths[0].is_file():
        raise click.UsageError("--check takes one script")
    (ported,) = ported_together(paths, level, read_project(paths), paths)
    if ported.outcome is None:
        raise click.ClickException(f"{paths[0]}: {ported.error}")
    result = compare(paths[0], ported.outcome.source, steps, arguments)
    click.echo(f"{paths[0]}: {result.text}")
    return {True: 0, None: FINDINGS, False: FAILED}[result.same]


def ported_together(paths: Sequence[Path], level: Level, project: Project, named: Sequence[Path]) -> list[Ported]:
    """Port files: once, and again where a question that stays in another file of the program decides."""
    files, used = dict[Path, Ported](), dict[Path, Known]()
    while again := [path for path in paths if used.get(path) is not project.known(path)]:
        for path in again:
            used[path] = project.known(path)
            files[path] = _ported(path, level, used[path], named=path in named)
            if (outcome := files[path].outcome) and outcome.splits:
                project = project.keeping([path])  # so that those that follow are ported once
        project = _agreeing(project, {path.resolve(): each.outcome for path, each in files.items() if each.outcome})
    return [files[path] for path in paths]


def _agreeing(project: Project, outcomes: Mapping[Path, Outcome]) -> Project:
    """Return a project after questions stay whose answer is a flag above lines that are left in another file."""
    for path in sorted(each for each in project.programs if not project.known(each).imported):  # scripts, no helpers
        program = sorted({path, *project.programs[path]} & {*outcomes})
        closing = [each for each in program if outcomes[each].closed]
        for one in (each for each in program if outcomes[each].answers):
            for other in (each for each in closing if each != one and outcomes[one].answers & outcomes[each].closed):
                project = project.keeping([other], path).keeping([one], path)
    return project


def _ported(path: Path, level: Level, known: Known, *, named: bool) -> Ported:
    """Port one file. An error is part of the result: other files go on.

    A file in a folder that has nothing to port may be in another language version; one that the user `named` may not.
    """
    try:
        script = read_script(path)
    except FileError as error:
        return Ported(path, error=str(error))
    source = script.source
    try:
        if named:
            parsed(source)
        outcome = port_source(source, level, known)
    except cst.ParserSyntaxError as error:
        return Ported(path, error=_unreadable(error, source), kept=lines_kept(source))
    except cst.CSTValidationError as error:
        return Ported(path, error=_unparsed(error, source), kept=lines_kept(source))
    except UnfaithfulError as error:
        return Ported(path, error=str(error), kept=lines_kept(source))
    if (why := _refusal(outcome.source)) and not _refusal(source):
        text = f"its port is no valid Python ({why}): a fault of accelcore port, please report it"
        return Ported(path, error=text, kept=outcome.before)
    return Ported(path, script, outcome)


def _refusal(source: str) -> str:
    """Return why this Python does not compile a source; "" if it does. The parser lets pass what is given twice."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the user's own strings
        try:
            compile(source, "<port>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            return str(error)
    return ""


def _written(ported: Ported, within: tuple[Path, ...]) -> Ported:
    """Replace a file by its port."""
    if ported.script is None or ported.outcome is None or ported.outcome.source == ported.before:
        return ported
    try:
        write_script(ported.script, ported.outcome.source, within)
    except FileError as error:
        return Ported(ported.path, error=str(error), kept=ported.outcome.before)
    return ported


def _unparsed(error: cst.CSTValidationError, source: str) -> str:
    """Return which line the parser refuses, though Python reads it: `assert(a if b else c)`."""
    if (found := _GLUED.search(source)) is None:
        return f"cannot be rewritten: {error}"
    line = source.count("\n", 0, found.start()) + 1
    return f"line {line} cannot be read: write a space after {found[1]}"


def _unreadable(error: cst.ParserSyntaxError, source: str) -> str:
    """Return what is wrong with a file. Python itself reads some mixtures of tabs and spaces; the parser does not."""
    if "dedent" in error.message or "indent" in error.message:
        remedy = "if Python runs this file, it mixes tabs and spaces: indent all lines by spaces"
        return f"indentation that cannot be read ({error.message}); {remedy}"
    if old := _ASYNC.search(source):
        line = source.count("\n", 0, old.end()) + 1
        return f"line {line} names an argument async, which Python 3.7 made a keyword: write non_blocking"
    return f"line {error.raw_line} is not Python that can be read: {error.message.split(': ', 2)[-1]}"


def main() -> None:
    """Run `accelcore-port`."""
    sys.exit(port.main(prog_name="accelcore-port", standalone_mode=False))


if __name__ == "__main__":
    main()

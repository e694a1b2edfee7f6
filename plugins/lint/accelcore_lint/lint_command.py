"""The command `lint`: `accelcore-lint`, and `accelcore lint` where accelcore is installed."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from accelcore_lint import __version__
from accelcore_lint.command import FINDINGS, Command, PathArgument
from accelcore_lint.files import Search, shown
from accelcore_lint.finding import Finding
from accelcore_lint.formats import FORMATS
from accelcore_lint.rules import RULES
from accelcore_lint.run import Result, lint_data, lint_files
from accelcore_lint.settings import Settings, codes, read

_STDIN = Path("-")


def _codes(context: click.Context, parameter: click.Parameter, value: Sequence[str]) -> frozenset[str] | None:
    words = [word.strip() for text in value for word in text.split(",")]
    return codes(words, f"--{parameter.name}") if words else None


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("paths", nargs=-1, type=PathArgument())
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", *FORMATS]),
    default="text",
    show_default=True,
    help="How findings are printed.",
)
@click.option(
    "--select",
    multiple=True,
    metavar="CODES",
    callback=_codes,
    help="Report these only: ACC301, ACC3, ALL; with commas.",
)
@click.option("--ignore", multiple=True, metavar="CODES", callback=_codes, help="Do not report these.")
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="This pyproject.toml, not the nearest.")
@click.option("--statistics", is_flag=True, help="Print how often each rule found something, and nothing else.")
@click.option("--exit-zero", is_flag=True, help="Exit with 0 even if something was found.")
@click.option("--explain", metavar="CODE", help="Print what a rule is about, with examples, and exit.")
@click.version_option(__version__, prog_name="accelcore-lint", message="%(prog)s %(version)s")
def lint(
    paths: tuple[Path, ...],
    form: str,
    select: frozenset[str] | None,
    ignore: frozenset[str] | None,
    config: Path | None,
    explain: str | None,
    *,
    statistics: bool,
    exit_zero: bool,
) -> int:
    """Find what ties a training script to one device, or is wrong on any device.

    PATHS are scripts, notebooks and folders, by default this folder; - is standard input. They are parsed, and never
    imported. A comment `# accel: ignore[ACC101]` ignores a finding on its line.

    \b
    Exit code:
      0   nothing was found
      1   something was found, or a file cannot be read or parsed
      64  the request is invalid

    \b
    Examples:
      accelcore lint train.py
      accelcore lint --select ACC101,ACC3 src
      accelcore lint --format sarif . > findings.sarif
      accelcore lint --explain ACC101
    """
    if explain is not None:
        click.echo(_explanation(explain))
        return 0
    settings = _settings(config, select, ignore)
    notes: list[str] = []
    results = _results(paths or (Path("."),), settings, notes)
    findings = [finding for result in results for finding in result.findings if settings.counts(finding)]
    if statistics:
        _count(findings)
    elif form == "text":
        _show(findings)
    elif findings or form != "github":
        click.echo(FORMATS[form](findings))
    problems = [f"{shown(result.path)} was not linted: {result.problem}" for result in results if result.problem]
    for line in (*notes, *problems):
        click.echo(line, err=True)
    if form == "text":
        files, linted = len({finding.path for finding in findings}), [each for each in results if not each.problem]
        found = f"{_number(findings, 'finding')} in {files} of" if findings else "no findings in"
        click.echo(f"{found} {_number(linted, 'file')}", err=True)
    return FINDINGS if (findings or problems) and not exit_zero else 0


def _settings(config: Path | None, select: frozenset[str] | None, ignore: frozenset[str] | None) -> Settings:
    found = read(config)
    chosen = found.select if select is None else select
    return dataclasses.replace(found, select=chosen - (ignore or frozenset()))


def _results(paths: Sequence[Path], settings: Settings, notes: list[str]) -> list[Result]:
    files = Search(settings, notes).files([path for path in paths if path != _STDIN])
    results = list(lint_files(list(files)))
    if _STDIN in paths:
        results.append(lint_data(sys.stdin.buffer.read(), "-"))
    return results


def _show(findings: Sequence[Finding]) -> None:
    from rich.console import Console

    from accelcore_lint.text import show

    show(findings, Console(highlight=False, markup=False, emoji=False))


def _count(findings: Sequence[Finding]) -> None:
    for code, count in sorted(Counter(finding.code for finding in findings).items()):
        rule = RULES.get(code)
        click.echo(f"{count:6} {code} {rule.name if rule else ''}".rstrip())


def _explanation(code: str) -> str:
    from accelcore_lint.page import section

    if code not in RULES:
        raise click.ClickException(f"--explain: there is no rule {code!a}; there are {', '.join(RULES)}")
    return section(RULES[code])


def _number(items: Sequence[object], name: str) -> str:
    return f"{len(items)} {name}{'' if len(items) == 1 else 's'}"


def main() -> None:
    """Run `accelcore-lint`."""
    try:
        code = lint.main(prog_name="accelcore-lint", standalone_mode=False)
        sys.stdout.flush()
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except BrokenPipeError:
        # The interpreter flushes stdout again at exit; that must not fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()

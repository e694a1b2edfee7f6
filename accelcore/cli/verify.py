"""`accelcore verify backend NAME`: run the conformance suite in child processes, and print its scorecard.

The operators, which take two thirds of the time, have two processes of their own. If a process crashes or hangs, the
test in which it did has failed, and another process runs the tests after it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from accelcore.cli import ROLES
from accelcore.cli.options import common, devices, json_option, number
from accelcore.devices.request import parse
from accelcore.devices.select import decide
from accelcore.errors import ConfigurationError, PluginError
from accelcore.jobs.launchers import outside_any_job
from accelcore.testing.support import UNUSABLE
from accelcore.util import child_process
from accelcore.util.child_process import Ended
from accelcore.util.text import shown

OUTCOMES = ("passed", "failed", "not declared", "not tried")

_SUITE = "accelcore.testing.suite"  # as the child imports it: a path could belong to another installation
_DEEP = "accelcore.testing.every_operator"
_HALVES = ("not test_options", "test_options")  # of the operators, by the names of tests
_DONE = (0, 1, 5)  # pytest's codes: all passed, some failed, nothing left to run
_ENDS = "The process that used the backend ends without a crash."
_TAIL = 2000  # last characters of a process's output, or
_CRASH, _BEFORE = "Fatal Python error", 500  # if there is a crash, from there on, with so many before it
_SHOWN = 12  # lines of a failure in text
_COLORS = {"passed": "green", "failed": "red", "not declared": "yellow", "not tried": "yellow"}


@dataclass(frozen=True)
class Verdict:
    """Outcome of one test."""

    role: str  # one of `ROLES`
    name: str  # the test's name
    case: str  # its parameters
    what: str  # the property that it tests, in a sentence
    outcome: str = ""  # one of `OUTCOMES`
    why: str = ""  # the reason, if it did not pass
    seconds: float = 0.0
    # file and line of each call on the way to the failure, from the test down
    where: list[str] = field(default_factory=list)
    traceback: str = ""
    on_host: str = ""  # the operator, if the device hands it to the CPU, with the kernels that it lacks
    known_bug: str = ""  # the operator, if a known bug of the installed versions shows in it, with the bug


@dataclass
class Scorecard:
    """Outcomes of the suite for one backend."""

    backend: dict[str, Any]  # its name, index, device, capabilities, whether it is emulated, and torch's version
    verdicts: list[Verdict]  # one for each test, in the order they were run

    @property
    def conforms(self) -> bool:
        """Whether nothing failed, and something passed."""
        outcomes = {verdict.outcome for verdict in self.verdicts}
        return "failed" not in outcomes and "passed" in outcomes

    def counts(self, role: str | None = None) -> Counter[str]:
        """Count the outcomes of a role's tests, or of all tests."""
        return Counter(verdict.outcome for verdict in self.verdicts if role in (None, verdict.role))

    @property
    def hardly_tried(self) -> list[str]:
        """The roles of which more tests were not tried than were, such as `67 of 70 tests of collectives`."""
        counts = {role: self.counts(role) for role in ROLES}
        return [
            f"{count['not tried']} of {count.total()} tests of {role}"
            for role, count in counts.items()
            if count["not tried"] > count["passed"] + count["failed"]
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the scorecard for JSON."""
        roles = {role: {outcome: self.counts(role)[outcome] for outcome in OUTCOMES} for role in ROLES}
        return {
            "schema": 1,
            "backend": self.backend,
            "conforms": self.conforms,
            "roles": {role: counts for role, counts in roles.items() if sum(counts.values())},
            "tests": [asdict(verdict) for verdict in self.verdicts],
        }


class _Verify(click.Group):
    """Group that names the command which is meant by `accelcore verify cpu`."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().get_command(ctx, cmd_name)
        if found is None and not ctx.resilient_parsing:  # a shell that completes a line wants no error
            ctx.fail(f"No such command {cmd_name!r}. Write: accelcore verify backend {cmd_name}")
        return found


@click.group("verify", cls=_Verify, subcommand_metavar="backend NAME [OPTIONS]")
def commands() -> None:
    """Test whether a backend works as it declares.

    \b
    Examples:
      accelcore verify backend cpu
      accelcore verify backend cpu --only scaler
    """


@commands.command("backend")
@click.argument("name", shell_complete=devices)
@json_option
@click.option(
    "--only",
    metavar="ROLE",
    type=click.Choice(ROLES),
    multiple=True,
    help="Test only this part: backend, operators, training, or one of the six roles. May be given several times.",
)
@click.option("--deep", is_flag=True, help="Compare all of torch's operators with the CPU; takes minutes.")
@number("--timeout", "SECONDS", 300, "How long one test may take.", most=86400)
@common
def verify_backend(name: str, as_json: bool, only: tuple[str, ...], deep: bool, timeout: int) -> int:
    """Run the conformance suite on the backend NAME.

    Declared features are tested; other features must be refused with UnsupportedError. A test that crashes or hangs has
    failed, and the other tests still run. Needs pytest: pip install '.[testing]' in a clone of accelcore.

    \b
    Exit code:
      0   it conforms: nothing failed
      1   something failed
      64  the request is invalid, or the backend cannot be used here

    \b
    Examples:
      accelcore verify backend cpu
      accelcore verify backend cuda:1 --only precision --only training
      accelcore verify backend npu --only operators --deep --timeout 60
      accelcore verify backend cpu --json > scorecard.json
    """
    card = verify(name, roles=only, timeout=timeout, deep=deep)
    if as_json:
        click.echo(json.dumps(card.as_json(), indent=2))
    else:
        show(card, tracebacks=click.get_current_context().obj.debug)
    return 0 if card.conforms else 1


def verify(name: str, *, roles: Sequence[str] = (), timeout: float = 300, deep: bool = False) -> Scorecard:
    """Run the suite on a backend, `NAME` or `NAME:INDEX`; its `roles`, or all; `timeout` seconds a test."""
    choices = parse(name, "backend")
    if choices is None or len(choices) != 1:
        raise ConfigurationError(f"backend={shown(name)} is not one backend", remedy="name one, such as cpu or cuda:1")
    decide(name, "backend", lambda found: None)
    for package in ("pytest", "expecttest") if deep else ("pytest",):
        if find_spec(package) is None:
            raise ConfigurationError(
                f"the conformance suite needs {package}, which is not installed",
                remedy="pip install '.[testing]' in a clone of accelcore",
            )
    wanted = roles or ROLES
    shares = [([role for role in wanted if role != "operators"], "")]
    shares += [(["operators"], half) for half in _HALVES if "operators" in wanted]
    with tempfile.TemporaryDirectory(prefix="accelcore-") as folder:
        tested = [(*share, _Report(Path(folder, str(number)))) for number, share in enumerate(shares) if share[0]]
        reports = [report for *_, report in tested]
        child_process.run_together(
            [_test(name, share, half, report, timeout, deep=deep) for share, half, report in tested],
            on_look=partial(_show_progress, reports, set()),
        )
    verdicts = [verdict for report in reports for verdict in report.verdicts.values()]
    return Scorecard(reports[0].backend, sorted(verdicts, key=lambda verdict: ROLES.index(verdict.role)))


def _test(
    name: str, roles: Sequence[str], half: str, report: _Report, timeout: float, *, deep: bool
) -> Generator[None, None, None]:
    """Run processes until each test of these roles has an outcome; with `half`, those tests whose names match it."""
    tests = [f"{_SUITE}.{role}::Test{role.capitalize()}" for role in roles]
    if deep and half == _HALVES[0]:
        tests.append(_DEEP)
    tests += ["-k", half] if half else []
    report.file.touch()
    while True:
        known = len(report.verdicts)
        ended, last_words = yield from _run(name, tests, report.file, timeout)
        report.read()
        why = f"the process {ended.fate}\n{last_words}"
        if report.done:
            assert len(report.verdicts) == report.count, "a test has no outcome"
            if ended.status not in _DONE:
                report.verdicts["end"] = Verdict("backend", "end", "", _ENDS, "failed", why)
            return
        crashed = next((test for test, verdict in report.verdicts.items() if not verdict.outcome), None)
        if len(report.verdicts) == known or (crashed is None and ended.status != UNUSABLE):
            raise PluginError(
                f"the suite could not be run on {name}",
                why=why,
                remedy="read that output; accelcore doctor --deep tries the backend alone",
            )
        with report.file.open("a", encoding="utf-8") as file:
            if crashed is not None:
                file.write(f"\n{json.dumps({'event': 'end', 'id': crashed, 'outcome': 'failed', 'why': why})}\n")


def _show_progress(reports: Sequence[_Report], shown: set[str]) -> None:
    for report in reports:
        report.read()
    for report in reports if all(report.count for report in reports) else ():
        begun = {verdict.role for verdict in report.verdicts.values()}
        for role in sorted(begun - shown, key=ROLES.index):
            shown.add(role)
            ended = sum(bool(verdict.outcome) for each in reports for verdict in each.verdicts.values())
            click.echo(f"{ended} of {sum(each.count for each in reports)} tests  {role}", err=True)


def show(card: Scorecard, *, tracebacks: bool = False) -> None:
    """Print the scorecard to stdout; colours only on a terminal."""
    backend = card.backend
    emulated = "EMULATED: " if backend["emulated"] else ""
    click.secho(f"{emulated}{backend['name']}:{backend['index']}, torch {backend['torch']}", bold=True)
    click.echo("\n" + " " * 14 + "".join(head.rjust(14) for head in (*OUTCOMES, "tests")))
    for role in (*ROLES, None):
        counts = card.counts(role)
        if counts:
            cells = (
                click.style(str(counts[outcome]).rjust(14), fg=_COLORS[outcome] if counts[outcome] else None)
                for outcome in OUTCOMES
            )
            click.echo(f"  {role or 'all':12}" + "".join(cells) + str(counts.total()).rjust(14))
    for verdict in card.verdicts:
        if verdict.outcome == "failed":
            click.echo(f"\n{click.style('failed', fg='red')}  {verdict.role}: {verdict.what}{_case(verdict)}")
            long = tracebacks and verdict.traceback
            for line in verdict.traceback.splitlines() if long else verdict.why.strip().splitlines()[:_SHOWN]:
                click.echo(f"    {line}")
            for place in verdict.where:
                click.echo(f"    at {place}")
    for outcome in OUTCOMES[2:]:
        reasons = {(verdict.role, verdict.why): None for verdict in card.verdicts if verdict.outcome == outcome}
        if reasons:
            click.echo()
        for role, why in reasons:
            click.echo(f"{click.style(outcome, fg='yellow')}  {role}: {why}")
            for verdict in card.verdicts if outcome == "not tried" else ():
                if (verdict.outcome, verdict.role, verdict.why) == (outcome, role, why):
                    click.echo(f"    {verdict.what}{_case(verdict)}")
    for verdict in card.verdicts:
        if verdict.known_bug:
            click.echo(f"\n{click.style('a known bug', fg='yellow')}  operators: {verdict.known_bug}")
    handed = [verdict.on_host for verdict in card.verdicts if verdict.on_host]
    if handed:
        click.echo(f"\n{click.style('on the host', fg='yellow')}  operators: {', '.join(handed)}")
    failed = card.counts()["failed"]
    tested = [role for role in ROLES if card.counts(role)]
    part = "the tested part of " if card.conforms and len(tested) < len(ROLES) else ""
    conclusion = "conforms" if card.conforms else f"does not conform: {failed} failed"
    if card.hardly_tried:
        conclusion += f"; not tried: {', '.join(card.hardly_tried)}"
    color = "green" if card.conforms else "red"
    click.secho(f"\n{emulated}{part}{backend['name']} {conclusion}", fg=color, bold=True)


def _case(verdict: Verdict) -> str:
    return f" [{verdict.case}]" if verdict.case else ""


def _run(name: str, tests: Sequence[str], report: Path, timeout: float) -> Generator[None, None, tuple[Ended, str]]:
    """Run one process of pytest, for `timeout` seconds a test; return its end and its last output."""
    command = [
        sys.executable, "-X", "faulthandler", "-m", "pytest", "--pyargs", *tests,
        "-p", "accelcore.testing.support.report", "--accelcore-backend", name, "--accelcore-report", str(report),
        # Without the user's configuration, plugins and caches.
        "-c", os.devnull, f"--rootdir={report.parent}", "--noconftest", "-p", "no:cacheprovider", "-q", "--tb=short",
    ]  # fmt: skip
    # The suite forms its own jobs; as a rank of another job it would wait for ranks that never come.
    environ = {name: value for name, value in outside_any_job(os.environ).items() if not name.startswith("PYTEST_")}
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait by spinning slow other processes
    ended = yield from child_process.watch(
        command, environ=environ, limit=timeout, folder=report.parent, progress=report
    )
    text = (ended.stdout + ended.stderr).strip()
    crash = text.find(_CRASH)
    return ended, text[-_TAIL:] if crash < 0 else text[max(0, crash - _BEFORE) :][:_TAIL]


@dataclass
class _Report:
    """Contents of the report that the suite's processes write: what is known so far."""

    file: Path
    backend: dict[str, Any] = field(default_factory=dict)
    count: int = 0
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    done: bool = False
    _position: int = 0

    def read(self) -> None:
        """Read the lines that were added."""
        with self.file.open("rb") as file:
            file.seek(self._position)
            for text in file:
                if not text.endswith(b"\n"):
                    break  # the rest may follow
                self._position += len(text)
                with suppress(ValueError):  # a process that was killed may have written half a line
                    self._take(json.loads(text))

    def _take(self, line: dict[str, Any]) -> None:
        match line.pop("event", None):
            case "backend":
                self.backend = line
            case "collected":
                self.count = line["count"]
            case "begin":
                test = line.pop("id")
                self.verdicts[test] = Verdict(**line)
            case "end":
                test = line.pop("id")
                self.verdicts[test] = replace(self.verdicts[test], **line)
            case "done":
                self.done = True

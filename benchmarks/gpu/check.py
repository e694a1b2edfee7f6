"""Everything that is said of a GPU, measured on one: its tests, its speed, its precisions.

    python scripts/gpu_check.py --stage all --output benchmarks/results
    python scripts/gpu_check.py --stage gpt --output results --again
    python scripts/gpu_check.py --stage all --toy --device cpu --output rehearsal

Works from a copy of the tree with Python 3.11 and torch, and nothing installed; where accelcore is installed, that is
what is measured. Each stage runs in a process of its own, for less than `--limit` seconds, and is written to
OUTPUT/gpu-CHIP.json when it is done. So a run may be cut short and started again: what is there is not run again.
`--toy`, and any device but cuda, makes a rehearsal: everything runs, and its numbers mean nothing.

Exit status: 0 every stage asked for is done and every goal met; 1 a stage failed or a goal was missed; 2 impossible as
asked; 3 there was no time for a stage: run it again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import FAILED, MISSED, STAGES, Findings, Results, slug
from benchmarks.gpu.tree import make_importable

__all__ = ["Child", "ChildError", "main"]

NEEDED = {
    "experiments": 150.0,
    "tests": 300.0,
    "step": 100.0,
    "gpt": 300.0,
    "batches": 420.0,
    "profile": 100.0,
    "optimizers": 300.0,
    "options": 200.0,
    "resnet": 300.0,
    "start": 250.0,
    "feed": 60.0,
    "checkpoint": 100.0,
    "precision": 300.0,
}
"""Seconds that a stage has to get, to be begun beside others."""

NEEDED_TOY = 5.0
GRACE = 10.0
"""Seconds after which a stage that should be over is ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for and is not there yet."""
    options = _parser().parse_args(arguments)
    end = time.monotonic() + options.limit
    with tempfile.TemporaryDirectory(prefix="accelcore-gpu-") as folder:
        source = make_importable(Path(folder), backend=options.device)
        child = Child(Path(folder), options)
        try:
            found = child.run("describe", end - time.monotonic())
        except ChildError as error:
            print(f"cannot use {options.device}: {error}", file=sys.stderr)
            return 2
        name = f"gpu-{slug(found['chip'])}{'-rehearsal' if found['rehearsal'] else ''}.json"
        try:
            results = Results(options.output / name)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        print(f"{found['chip']}, accelcore: {source}, results: {results.path}")
        if found["rehearsal"]:
            print("REHEARSAL: the numbers below mean nothing")
        wanted = STAGES if options.stage == "all" else (options.stage,)
        for stage in _order(wanted, results, again=options.again):
            left = end - time.monotonic() - GRACE
            if options.stage == "all" and left < (NEEDED_TOY if options.toy else NEEDED[stage]):
                print(f"\n{stage}: not begun, {left:.0f} s are left", flush=True)
                continue
            print(f"\n{stage}: {left:.0f} s at most", flush=True)
            record = {**_stage(child, stage, left, found["rehearsal"]), "source": source}
            results.add(stage, record)
            _show(record)
    return _conclude(wanted, results)


class ChildError(Exception):
    """A process ended without a result."""


class Child:
    """Runs one thing at a time in a Python of its own, and ends all that it started."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder = folder
        self._arguments = ["--device", options.device, *(["--toy"] if options.toy else [])]
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def run(self, what: str, seconds: float) -> dict[str, Any]:
        """The result of `python -m benchmarks.gpu WHAT`.

        Raises:
            ChildError: it wrote none, or took longer than it may.
        """
        result = self._folder / f"{what}.json"
        command = [sys.executable, "-m", "benchmarks.gpu", what, *self._arguments]
        command += ["--seconds", f"{seconds:.1f}", "--result", str(result)]
        child = subprocess.Popen(
            command, cwd=self._folder, env=self._environment, start_new_session=True
        )  # fmt: skip
        why = ""
        try:
            child.wait(timeout=max(1.0, seconds) + GRACE / 2)
        except subprocess.TimeoutExpired:
            why = f"it was ended after {seconds + GRACE / 2:.0f} s"
        finally:
            _end(child)
        if why or not result.exists():
            raise ChildError(why or f"it ended with status {child.returncode}")
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return found


def _stage(child: Child, stage: str, seconds: float, rehearsal: bool) -> dict[str, Any]:
    try:
        return child.run(stage, seconds)
    except ChildError as error:
        return Findings({}, failures=[str(error)]).record(rehearsal=rehearsal)


def _show(record: dict[str, Any]) -> None:
    if not record["rehearsal"]:
        for goal in record["goals"]:
            print(f"goal {'met' if goal['met'] else 'MISSED'}: {goal['text']}")


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child and whatever it started, which is in the child's session."""
    with suppress(ProcessLookupError, PermissionError):  # all of them are gone
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _order(wanted: Sequence[str], results: Results, *, again: bool) -> list[str]:
    """What is to be run: first what was never run, then what failed, with `again` also the rest."""
    for stage in wanted:
        if results.finished(stage) and not again:
            print(f"{stage}: is there already; --again runs it again")
    todo = [stage for stage in wanted if again or not results.finished(stage)]
    return sorted(todo, key=lambda stage: stage in results.stages)


def _conclude(wanted: Sequence[str], results: Results) -> int:
    """Say what is wrong in the last lines; the exit status."""
    wrong, absent = [], []
    for stage in wanted:
        record = results.stages.get(stage)
        if record is None:
            absent.append(stage)
        elif record["status"] == FAILED:
            wrong += [f"{stage} failed: {failure}" for failure in record["failures"]]
        elif record["status"] == MISSED:
            wrong += [f"goal missed: {goal['text']}" for goal in record["goals"] if not goal["met"]]
    print(f"\nresults: {results.path}{', a REHEARSAL: no goal was judged' if results.rehearsal else ''}")
    for line in wrong:
        print(line)
    if absent:
        print(f"not run for lack of time, run again: {', '.join(absent)}")
    if not wrong and not absent:
        print(f"done: {', '.join(wanted)}" + ("" if results.rehearsal else "; every goal met"))
    return 1 if wrong else 3 if absent else 0


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise ValueError(text)
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", choices=[*STAGES, "all"], required=True, help="what to run")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="where the JSON is, or will be")
    parser.add_argument(
        "--limit", metavar="SECONDS", type=_seconds, default=470.0, help="for everything (default: 470)"
    )
    parser.add_argument("--again", action="store_true", help="also run stages whose results are there")
    parser.add_argument("--toy", action="store_true", help="tiny sizes: a rehearsal")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: cuda")
    return parser

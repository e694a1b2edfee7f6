"""Trials of a script: the unchanged script for some steps, in a child process, with other options for its trainers."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelcore.devices.request import TRIAL, TrialRequest
from accelcore.util import child_process
from accelcore.util.child_process import Ended

_TAIL = 12  # lines of a script's error


@dataclass(frozen=True)
class Script:
    """The script to try."""

    command: Sequence[str]  # arguments of `accelcore run`: its options, the script, the script's own arguments
    steps: int  # windows of a trial
    limit: float  # seconds that a step, and the start, may take


@dataclass(frozen=True)
class Variant:
    """Options of a trainer that a trial overrides, under a name. `seed` is added to the script's seeds."""

    name: str
    options: Mapping[str, Any]
    seed: int = 0


@dataclass
class Outcome:
    """Record of a trial: of the first trainer that the script made."""

    # the trainer's model, device, capabilities, and the options that were overridden; empty if there is no trainer
    about: dict[str, Any] = field(default_factory=dict)
    trainers: int = 0  # how many trainers the script made
    checksums: list[list[int]] = field(default_factory=list)  # of the first batches that `trainer.batches` yielded
    losses: list[float | None] = field(default_factory=list)  # mean loss of each window; None if it was not finite
    seconds: list[float] = field(default_factory=list)  # of each window but the first, with loading its batches
    overflows: list[bool] = field(default_factory=list)  # whether each window's update was skipped for overflow
    memory: int = 0  # peak in bytes; 0 if the trial did not end
    failure: str = ""  # why it did not do all its steps; empty if it did


def try_script(script: Script, variant: Variant) -> Outcome:
    """Run one trial to its end and return its record. Ctrl-C ends the script with this process."""
    with tempfile.TemporaryDirectory(prefix="accelcore-") as folder:
        report = Path(folder, "trial.jsonl")
        report.touch()
        trial = TrialRequest(str(report), script.steps, variant.seed, variant.options)
        environ = {**os.environ, TRIAL: json.dumps(asdict(trial))}
        command = ("accelcore.cli", "run", *script.command)
        ended = child_process.call(*command, environ=environ, limit=script.limit, progress=report)
        found = _read(report)
    if not found.memory:
        found.failure = _failure(found, ended, script)
    return found


def _read(report: Path) -> Outcome:
    """Return what a report has so far. Its last line may be incomplete."""
    found = Outcome()
    *lines, _ = report.read_text(encoding="utf-8").split("\n")
    records = [json.loads(line) for line in lines]
    first = min((record["trainer"] for record in records), default=None)
    found.trainers = len({record["trainer"] for record in records})
    for record in records:
        if "done" in record:  # of whichever trainer was the first to do its steps
            found.memory = max(1, record["memory"])
        if record["trainer"] != first:
            continue
        if "device" in record:
            found.about = record
        elif "checksums" in record:
            found.checksums.append(record["checksums"])
        elif "step" in record:
            found.losses.append(record["loss"])
            found.overflows.append(record["overflow"])
            if record["seconds"] is not None:
                found.seconds.append(record["seconds"])
    return found


def _failure(found: Outcome, ended: Ended, script: Script) -> str:
    done = len(found.losses)
    if ended.status is None:
        return f"no step for {ended.limit:g} seconds, after {done} steps"
    if ended.signal:
        return f"ended by {ended.signal} after {done} steps"
    if ended.status:
        return "\n".join(ended.stderr.strip().splitlines()[-_TAIL:]) or f"exit code {ended.status}"
    if not found.trainers:
        return "it made no trainer: accel.trainer(...) was not called"
    return f"it ended after {done} of {script.steps} steps"

"""Comparison of a script with its port: both run on the CPU from the same seed, in processes of their own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT = 600.0
_EXACT, _LOW_PRECISION = 1e-4, 2e-2
_NO_DEVICE = {"ACCEL_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`.

    Attributes:
        same: True or False; None if the original or the port gave no losses to compare.
        text: one line for the user.
    """

    same: bool | None
    text: str


@dataclass(frozen=True)
class _Run:
    losses: list[float]
    error: str | None


def compare(script: Path, ported: str, steps: int, arguments: Sequence[str]) -> Comparison:
    """Run a script and its port on the CPU, and compare the losses of their first steps.

    A loss is what `backward` is called on. A constant factor between the two runs, such as the length of a window, does
    not count as a difference, and is reported.

    Args:
        script: the original. It runs as the user runs it, in the present folder, and writes what it writes.
        ported: source of the port.
        steps: how many losses to compare.
        arguments: of the script.
    """
    before = _run(script, script.read_text("utf-8"), steps, arguments)
    after = _run(script, ported, steps, arguments)
    if before.losses and after.losses:
        return _judge(before, after, "autocast" in ported)
    old, new = (run.error or "it calls backward in no process of its own" for run in (before, after))
    if after.losses:
        text = f"the original gives no losses on this CPU ({old}); the port ran {len(after.losses)} steps"
        return Comparison(None, f"not compared: {text}")
    if before.losses:
        ran = f"the original ran {len(before.losses)} steps"
        return Comparison(False if after.error else None, f"the port gives no losses on this CPU ({new}); {ran}")
    if old == new:
        return Comparison(None, f"not compared: neither the original nor the port gives losses on this CPU ({old})")
    text = f"the port gives no losses on this CPU ({new}), and neither does the original ({old})"
    return Comparison(False if after.error else None, text)


def _judge(before: _Run, after: _Run, low_precision: bool) -> Comparison:
    if len(before.losses) != len(after.losses):
        text = f"{len(before.losses)} losses before, {len(after.losses)} after"
        return Comparison(False, f"different: {text}{_errors(before, after)}")
    bound = _LOW_PRECISION if low_precision else _EXACT
    factor = after.losses[0] / before.losses[0] if before.losses[0] else 1.0
    factor = 1.0 if math.isclose(factor, 1.0, rel_tol=bound) else factor
    largest = 0.0
    for step, (old, new) in enumerate(zip(before.losses, after.losses, strict=True)):
        if not math.isclose(old * factor, new, rel_tol=bound, abs_tol=1e-7) and not (
            math.isnan(old) and math.isnan(new)
        ):
            return Comparison(False, f"different at step {step}: {old:.6g} before, {new:.6g} after")
        if old != new and math.isfinite(new):
            largest = max(largest, abs(old * factor - new) / max(abs(new), 1e-7))
    scaled = "" if factor == 1.0 else f", but for a constant factor of {factor:g} (such as a window's length)"
    exact = f"with differences up to {largest:.1g}" if largest else "to the bit"
    text = f"the same losses in {len(before.losses)} steps on the CPU, {exact}{scaled}"
    return Comparison(True, text + _errors(before, after))


def _errors(before: _Run, after: _Run) -> str:
    found = {run.error for run in (before, after) if run.error}
    return "; then: " + "; ".join(sorted(found)) if found else ""


def _run(script: Path, source: str, steps: int, arguments: Sequence[str]) -> _Run:
    with tempfile.TemporaryDirectory(prefix="accelcore-port-") as folder:
        file, result = Path(folder, script.name), Path(folder, "losses.json")
        file.write_text(source, "utf-8", newline="")
        command = [sys.executable, "-m", "accelcore_lint.port.child", str(file), str(script), str(steps), str(result)]
        try:
            done = subprocess.run(  # noqa: S603  # the user's own script
                [*command, *arguments],
                env={**os.environ, **_NO_DEVICE},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return _Run([], f"it took more than {_TIMEOUT:g} seconds")
        if not result.exists():
            last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            return _Run([], last[0])
        values = json.loads(result.read_text())
        return _Run(values["losses"], values["error"])

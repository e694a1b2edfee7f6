"""The experiments, each in a process of its own, because one that fails may leave the GPU unusable to its process."""

from __future__ import annotations

import json
import subprocess
import sys
from time import perf_counter
from typing import Any

from benchmarks.gpu.device import Deadline, Device
from benchmarks.gpu.experiments import EXPERIMENTS
from benchmarks.gpu.results import Findings

__all__ = ["run"]

_LONGEST = 100.0
"""Seconds for one experiment."""


def run(device: Device, deadline: Deadline) -> Findings:
    """Record what each experiment found. One that ends by an error is a failure, and the others still run."""
    found: dict[str, Any] = {}
    failures: list[str] = []
    for name, experiment in EXPERIMENTS.items():
        question = (experiment.__doc__ or "").splitlines()[0]
        print(f"  {name}: {question}", flush=True)
        start = perf_counter()
        answer, failure = _ask(name, device, min(_LONGEST, deadline.left - 5))
        found[name] = {"question": question, "seconds": round(perf_counter() - start, 1), "answer": answer}
        print(f"    {failure or json.dumps(answer)}", flush=True)
        if failure:
            failures.append(f"{name}: {failure}")
    return Findings({"experiments": found}, failures=failures)


def _ask(name: str, device: Device, seconds: float) -> tuple[Any, str]:
    if seconds < 5:
        return None, "there was no time for it"
    command = [sys.executable, "-m", "benchmarks.gpu.experiments", name, "--device", device.type]
    command += ["--toy"] if device.toy else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, f"it was ended after {seconds:.0f} s"
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return None, f"it ended with status {done.returncode}: {_last(done.stderr)}"
    return json.loads(lines[-1]), _last(done.stderr) if name == "E10" and done.stderr.strip() else ""


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1][:300]

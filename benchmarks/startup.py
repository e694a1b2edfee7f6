"""What an import costs next to importing torch.

Every sample is a fresh interpreter, timed from outside from its start to its end, with the time of one that does
nothing taken off. All run with `-I`: without the user's environment variables and site directory, but with the
installed packages. Files have been read before, so what is timed is a warm start.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

from benchmarks.paired import Samples, compare, sample
from benchmarks.report import Goal, Row, Table

__all__ = ["DISTRIBUTIONS", "run"]

DISTRIBUTIONS = ("accelcore", "accelcore-cpu", "torch", "accelerate", "lightning-fabric", "lightning")
GOAL = 0.05

NOTHING, TORCH, TWIN, ACCELCORE = "pass", "import torch", "import torch, again", "import accelcore"
PROGRAMS = {
    NOTHING: "pass",
    TORCH: "import torch",
    TWIN: "import torch",
    ACCELCORE: "import accelcore",
    "accelcore.installed()": "import accelcore; accelcore.installed()",
    'accelcore.select("cpu")': 'import accelcore; accelcore.select("cpu")',
    "import accelerate": "import accelerate",
    "import lightning_fabric": "import lightning_fabric",
    "import lightning.fabric": "import lightning.fabric",
}
# The packages that may be missing, by what needs them.
OPTIONAL = {
    "import accelerate": "accelerate",
    "import lightning_fabric": "lightning_fabric",
    "import lightning.fabric": "lightning",
}


def run(quick: bool) -> Iterator[Table]:
    """One table; the goal is on `import accelcore`."""
    rounds, seconds = (2, 0.25) if quick else (10, 0.25)
    cases = {name: partial(_start, program) for name, program in PROGRAMS.items() if _importable(name)}
    timings = compare(_beyond_nothing(sample(cases, rounds=rounds, seconds=seconds)), TORCH)
    notes = {name: "" if _importable(name) else "not installed" for name in PROGRAMS if name != NOTHING}
    notes[TWIN] = "noise floor"
    yield Table(
        title="a fresh process, beyond one that does nothing",
        base=TORCH,
        unit="ms",
        settings={"interpreter": "-I", "rounds": rounds, "seconds a sample": seconds, "clock": "perf_counter"},
        rows=[Row(name, timings.get(name), note) for name, note in notes.items()],
        goals=[Goal(f"{ACCELCORE} / {TORCH}", GOAL, timings[ACCELCORE].ratio.median)],
    )


def _start(program: str) -> None:
    subprocess.run(
        [sys.executable, "-I", "-c", program], check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )  # fmt: skip


def _beyond_nothing(samples: Samples) -> Samples:
    """Each sample less that of the empty program in the same round."""
    return {
        name: [seconds - nothing for seconds, nothing in zip(own, samples[NOTHING], strict=True)]
        for name, own in samples.items()
        if name != NOTHING
    }


def _importable(name: str) -> bool:
    return name not in OPTIONAL or find_spec(OPTIONAL[name]) is not None

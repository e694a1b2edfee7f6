"""What the command line costs: `accelcore doctor` next to `import torch`, `accelcore run x.py` next to `python x.py`.

Every sample is a fresh process, timed from outside from its start to its end, interpreter and all: it is what a user
waits for. Files have been read before, and doctor has seen that `import torch` works, so what is timed is a warm start.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.paired import compare, sample
from benchmarks.report import Goal, Row, Table

__all__ = ["DISTRIBUTIONS", "run"]

DISTRIBUTIONS = ("accelcore", "accelcore-cpu", "torch", "accelerate")
DOCTOR_GOAL, RUN_GOAL = 0.3, 1.1

TORCH, DOCTOR = 'python -c "import torch"', "accelcore doctor"
# `-I` is without the user's environment variables and site directory, but with the installed packages.
LOOKS = {
    TORCH: ("-I", "-c", "import torch"),
    f"{TORCH}, again": ("-I", "-c", "import torch"),
    DOCTOR: ("-I", "-m", "accelcore", "doctor"),
    "accelcore doctor --json": ("-I", "-m", "accelcore", "doctor", "--json"),
    "accelcore --help": ("-I", "-m", "accelcore", "--help"),
}

PYTHON, RUN = "python x.py", "accelcore run x.py"
TORCHRUN, ACCELERATE = "torchrun --nproc-per-node 1 x.py", "accelerate launch --num_processes 1 x.py"
# One rank each. No launcher hands `-I` on to the script, so that none has it. accelerate asks for all its options.
LAUNCHES = {
    PYTHON: (),
    f"{PYTHON}, again": (),
    RUN: ("-m", "accelcore", "run"),
    "accelcore run --device cpu x.py": ("-m", "accelcore", "run", "--device", "cpu"),
    TORCHRUN: ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
    ACCELERATE: (
        "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1",
        "--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1",
    ),
}  # fmt: skip
OPTIONAL = {ACCELERATE: "accelerate"}


def run(quick: bool) -> Iterator[Table]:
    """Two tables: what looks at the machine, and what starts a script. Each has a goal."""
    rounds = 3 if quick else 10
    looks = {name: partial(_start, *arguments) for name, arguments in LOOKS.items()}
    timings = compare(sample(looks, rounds=rounds), TORCH)
    yield Table(
        title="looking at the machine: a fresh process",
        base=TORCH,
        unit="ms",
        settings={"interpreter": "-I", "rounds": rounds, "clock": "perf_counter"},
        rows=[Row(name, timings[name], "noise floor" if name.endswith("again") else "") for name in LOOKS],
        goals=[Goal(f"{DOCTOR} / {TORCH}", DOCTOR_GOAL, timings[DOCTOR].ratio.median)],
    )
    with TemporaryDirectory() as folder:
        script = Path(folder) / "x.py"
        script.write_text("import torch\n", encoding="utf-8")
        launches = {
            name: partial(_start, *launcher, str(script)) for name, launcher in LAUNCHES.items() if _importable(name)
        }
        timings = compare(sample(launches, rounds=rounds), PYTHON)
    notes = {name: "" if _importable(name) else "not installed" for name in LAUNCHES}
    notes[f"{PYTHON}, again"] = "noise floor"
    yield Table(
        title="starting a script that imports torch: a fresh process, one rank",
        base=PYTHON,
        unit="ms",
        settings={"rounds": rounds, "clock": "perf_counter"},
        rows=[Row(name, timings.get(name), note) for name, note in notes.items()],
        goals=[Goal(f"{RUN} / {PYTHON}", RUN_GOAL, timings[RUN].ratio.median)],
    )


def _start(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, *arguments], check=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _importable(name: str) -> bool:
    return name not in OPTIONAL or find_spec(OPTIONAL[name]) is not None

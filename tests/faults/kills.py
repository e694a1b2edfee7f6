"""Jobs of two ranks that are killed at random moments, and resumed: `python -m tests.faults.kills --kills 20 --seed 0`.

Each run is trained once undisturbed, and once with SIGKILLs to one rank or to both. Every loss of every rank, also of
micro-batches that were trained twice, and the final parameters must be equal to the bit. Counts go to kills.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # forks import it by this name

import forks

RANKS = Path(__file__).with_name("killed_ranks.py")
RUNS = ("together", "zero1", "fsdp")
BATCHES = 96
LIMIT = 120
"""Seconds after which a rank that has not ended counts as hanging."""


def started(run: str, folder: Path, batches: int) -> list[forks.Fork]:
    """Start both ranks; the output of each goes to a folder of its own."""
    outputs = [Path(tempfile.mkdtemp(dir=folder.parent)) for _ in range(2)]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("ACCEL_")}
    return [
        forks.start([RANKS, run, folder, batches], {**environ, **place}, output)
        for place, output in zip(forks.places(2), outputs, strict=True)
    ]


def ended(ranks: list[forks.Fork]) -> list[int]:
    """Return the exit codes, when all have ended by themselves; print why a rank failed that was not killed."""
    try:
        codes = [rank.finish(LIMIT).returncode for rank in ranks]
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"a rank hangs\n{error.stderr}") from error
    for rank, code in zip(ranks, codes, strict=True):
        if code > 0 and -signal.SIGKILL not in codes:
            raise AssertionError(rank.finish().stderr)
    return codes


def lines(path: Path) -> list[list[object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def compared(folder: Path, whole: Path) -> int:
    """Check the losses and parameters of a run; return how many micro-batches were trained twice."""
    twice = 0
    for rank in range(2):
        expected = dict(lines(whole / f"losses-{rank}"))  # type: ignore[arg-type]
        found = lines(folder / f"losses-{rank}")
        assert {number for number, _ in found} == expected.keys(), f"rank {rank} did not train every micro-batch"  # type: ignore[misc]
        for number, losses in found:  # type: ignore[misc]
            assert losses == expected[number], f"rank {rank}, micro-batch {number}: {losses}, not {expected[number]}"
        final = [(one / f"final-{rank}").read_text() for one in (folder, whole)]
        assert final[0] == final[1], f"rank {rank} has other parameters"
        twice += len(found) - len(expected)
    return twice


def killed(ranks: list[forks.Fork], folder: Path, draw: random.Random) -> str | None:
    """Kill one rank or both at a random moment, also before the first micro-batch; None if they ended before."""
    victims = draw.choice([[0], [1], [0, 1]])
    log = folder / "losses-0"
    before = log.stat().st_size if log.exists() else 0
    if draw.random() < 0.8:  # once it trains
        until = time.monotonic() + LIMIT
        while (log.stat().st_size if log.exists() else 0) == before and all(one.process.is_alive() for one in ranks):
            assert time.monotonic() < until, "no micro-batch was trained"
            time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.3))
    alive = all(rank.process.is_alive() for rank in ranks)
    for victim in victims:
        ranks[victim].process.kill()
    saving = (folder / ".incomplete").exists()
    codes = ended(ranks)
    if not alive or -signal.SIGKILL not in codes:
        return None
    return f"{'both' if len(victims) == 2 else f'rank {victims[0]}'}{', while saving' if saving else ''}"


def survive(run: str, folder: Path, *, kills: int, seed: int, batches: int = BATCHES) -> dict[str, object]:
    """Train `run` undisturbed, then under `kills` SIGKILLs, again from the start if it ends before; return counts."""
    whole, draw = folder / "whole", random.Random(f"{run} {seed}")
    whole.mkdir(parents=True)
    assert ended(started(run, whole, batches)) == [0, 0]
    counts: Counter[str] = Counter()
    trainings, twice = 0, 0
    while counts.total() < kills:
        torn = folder / f"torn-{trainings}"
        torn.mkdir()
        while counts.total() < kills:
            kind = killed(started(run, torn, batches), torn, draw)
            if kind is None:
                break
            counts[kind] += 1
        if not (torn / "final-0").exists() or not (torn / "final-1").exists():
            assert ended(started(run, torn, batches)) == [0, 0]
        twice += compared(torn, whole)
        trainings += 1
        shutil.rmtree(torn)
    return {
        "kills": counts.total(),
        "of": dict(sorted(counts.items())),
        "trainings": trainings,
        "micro-batches of a training": 2 * batches,
        "trained twice": twice,
        "all losses and parameters equal": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", choices=RUNS, action="append", help="default: all")
    parser.add_argument("--out", type=Path, help="file for the counts")
    args = parser.parse_args()
    import torch

    import accelcore

    facts: dict[str, object] = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "seed": args.seed,
        "accelcore": accelcore.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    with tempfile.TemporaryDirectory() as folder:
        for run in args.run or RUNS:
            facts[run] = survive(run, Path(folder, run), kills=args.kills, seed=args.seed)
            sys.stdout.write(f"{run} {json.dumps(facts[run])}\n")
            sys.stdout.flush()
    if args.out:
        args.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The command line: `python -m benchmarks NAME [--quick] [--output FILE]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from benchmarks.machine import describe_machine, describe_versions
from benchmarks.report import print_table, write_results

# Each is a module here, with DISTRIBUTIONS, whose versions matter, and run(quick), which yields a table at a time.
_BENCHMARKS = {
    "cli": "what accelcore doctor and accelcore run cost next to importing torch",
    "flat": "what flat parameters and gradients do to a step, and that the trainer's choice never harms",
    "launches": "what a step launches on an emulated NPU next to the loop by hand",
    "optimizers": "the nine optimizers in multiples of what memory allows, beside torch's own and pytorch_optimizer",
    "precision": "what each precision costs and gains on the CPU, in shares of what products can do here",
    "overhead": "what a training step costs over the same step written by hand",
    "parallel": "what a step of two ranks, and a save of four, cost beside torch's engines by hand",
    "recording": "what recording a training with accelcore.Record costs",
    "startup": "what an import costs next to importing torch",
}
_RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; 0 where every goal is met, 1 where one is missed, 2 where it cannot run."""
    options = _parser().parse_args(arguments)
    try:
        module = import_module(f"benchmarks.{options.name}")
    except ModuleNotFoundError as error:
        print(
            f"{error}: {options.name} needs it. `tox run -e bench -- {options.name}` installs what a benchmark needs, "
            "and `tox run -e bench-npu` what launches needs",
            file=sys.stderr,
        )
        return 2
    machine, versions = describe_machine(), describe_versions(module.DISTRIBUTIONS)
    print(f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}")
    print(", ".join(f"{name} {version}" for name, version in versions.items()), end="\n\n", flush=True)
    path = options.output or _RESULTS / (f"{options.name}-quick.json" if options.quick else f"{options.name}.json")
    # What is done is kept if a later table fails, and beside the results of an earlier run, which are whole.
    unfinished = path.with_stem(f"{path.stem}-unfinished")
    write = partial(
        write_results, benchmark=options.name, quick=options.quick, machine=machine, versions=versions
    )  # fmt: skip
    tables = []
    for table in module.run(options.quick):
        print_table(table)
        tables.append(table)
        write(unfinished, tables=tables)
    write(path, tables=tables)
    unfinished.unlink(missing_ok=True)
    missed = [goal.what for table in tables for goal in table.goals if not goal.met]
    if missed:
        print(f"missed: {'; '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {name:10} {what}" for name, what in _BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure accelcore beside the same work by hand and by its peers.",
        epilog=f"benchmarks:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", choices=_BENCHMARKS, help="one of the benchmarks below")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: well under a minute, and noisier")
    parser.add_argument(
        "--output", metavar="FILE", type=Path,
        help="the JSON to write (default: benchmarks/results/NAME.json, or NAME-quick.json)",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())

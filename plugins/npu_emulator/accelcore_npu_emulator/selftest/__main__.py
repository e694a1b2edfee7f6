"""Command `python -m accelcore_npu_emulator.selftest`."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

from accelcore.errors import AccelError
from accelcore_npu_emulator import activate, selftest


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m accelcore_npu_emulator.selftest", description=selftest.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="operators to compare, such as nn.functional.gelu")
    parser.add_argument(
        "--sample-limit", type=int, default=3, metavar="N", help="samples of each operator (default 3); 1 is quick"
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth operator")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON as well")
    options = parser.parse_args(None if arguments is None else list(arguments))
    for option in ("sample_limit", "every"):
        if getattr(options, option) < 1:
            parser.error(f"--{option.replace('_', '-')} must be at least 1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some samples use deprecated functions
        try:
            activate()
            report = selftest.sweep(options.names, options.sample_limit, options.every)
        except (AccelError, ImportError, ValueError) as error:
            parser.error(str(error))
    sys.stdout.write(f"{report}\n")
    if options.json is not None:
        report.write(options.json)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())

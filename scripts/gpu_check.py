"""Everything that is said of a GPU, measured on one; see `--help`, docs/measurements.md and benchmarks/gpu/check.py."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu.check import main

if __name__ == "__main__":
    # An exception, so that what a stage has started is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())

"""Run the command line by `python -m accelcore`, for use without the console script."""

from __future__ import annotations

import sys

from accelcore.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""Scripts in forks, as in `tests/`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))  # also for the forks, which import it by its name
fork = import_module("forks").fork

"""The backend; scripts in forks, as in `tests/`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

import accelcore

sys.path.insert(0, str(Path(__file__).parent))  # native_cases
sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))  # also for the forks, which import it by its name
fork = import_module("forks").fork


@pytest.fixture(scope="module")
def accel():
    return accelcore.select("cpu")

"""What the tests of both plugins begin with: the emulated NPU, forks of `tests/forks.py`, and a clean environment.

With ACCEL_REQUIRE_EMULATED=1 the absence of torch_npu is an error, so that a run which was to prove something cannot
pass by leaving everything out.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))  # also for the forks, which import it by its name
forks = import_module("forks")

settings.load_profile("ci")  # as tests/conftest.py says

INSTALLED = find_spec("torch_npu") is not None
if INSTALLED:
    import_module("accelcore_npu_emulator").activate()
elif os.environ.get("ACCEL_REQUIRE_EMULATED") == "1":
    raise pytest.UsageError("ACCEL_REQUIRE_EMULATED=1, and torch_npu is not installed")


def pytest_configure(config):
    """Load torch_npu: torch's autograd engine counts the devices of each kind once, at the first backward pass of any.

    The process that gives tests to pytest-xdist's workers needs none.
    """
    if INSTALLED and config.getoption("dist", "no") == "no":
        import_module("torch_npu")


def pytest_report_header():
    """Say what the results are worth."""
    return "npu: EMULATED" if INSTALLED else "npu: torch_npu is not installed"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No test sees what the shell it was started from says to accelcore or to a launcher."""
    for variable in ("ACCEL_DEVICE", "ASCEND_RT_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)

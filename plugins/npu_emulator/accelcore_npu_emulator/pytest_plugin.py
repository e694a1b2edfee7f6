"""Tests on an emulated NPU.

In the topmost conftest.py of a test suite::

    pytest_plugins = ["accelcore_npu_emulator.pytest_plugin"]

and then `def test_x(emulated_npu): ...`. The whole session is emulated, with what ACCEL_EMULATED_* ask for, and so are
the processes that its tests start. Emulation begins after the conftest.py was read and before any test module is: a
conftest.py that imports torch itself names this plugin in pytest's options instead (`-p
accelcore_npu_emulator.pytest_plugin`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from accelcore.errors import AccelError
from accelcore_npu_emulator import Settings, activate
from accelcore_npu_emulator.build import TORCH_NPU

if TYPE_CHECKING:
    import torch

__all__ = ["emulated_npu"]


def pytest_configure() -> None:
    """Emulate the NPU of this session: torch_npu is imported by what is collected after this."""
    try:
        activate()
    except AccelError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_report_header() -> str:
    """Say in the report what the results are worth."""
    settings = Settings.from_environment()
    return f"EMULATED npu: {settings.devices} x {settings.soc}, torch_npu {TORCH_NPU} on host memory, no real device"


@pytest.fixture
def emulated_npu() -> Iterator[torch.device]:
    """The first emulated NPU, ready for use; its cached memory is given back after the test."""
    import torch
    import torch_npu

    yield torch.device("npu", 0)
    torch_npu.npu.empty_cache()

"""pytest plugin for tests on an emulated NPU.

In the topmost conftest.py of a test suite::

    pytest_plugins = ["accelcore_npu_emulator.pytest_plugin"]

and then `def test_x(emulated_npu): ...`. ACCEL_EMULATED_* apply to the whole session and to processes that tests start.
Emulation begins after pytest reads the conftest.py and before it reads test modules. If the conftest.py imports
torch, pass the plugin as an option of pytest instead: `-p accelcore_npu_emulator.pytest_plugin`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from accelcore.errors import AccelError
from accelcore_npu_emulator import Settings, activate
from accelcore_npu_emulator.wheel import torch_npu

if TYPE_CHECKING:
    import torch

__all__ = ["emulated_npu"]


def pytest_configure() -> None:
    """Emulate the NPU of this session, before test modules import torch_npu."""
    try:
        activate()
    except AccelError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_report_header() -> str:
    """Return the report's header, which marks the results as emulated."""
    settings, version = Settings.from_environment(), torch_npu().version
    return f"EMULATED npu: {settings.devices} x {settings.soc}, torch_npu {version} on host memory, no real device"


@pytest.fixture
def emulated_npu() -> Iterator[torch.device]:
    """Yield the first emulated NPU; free its cached memory after the test."""
    import torch
    import torch_npu

    yield torch.device("npu", 0)
    torch_npu.npu.empty_cache()

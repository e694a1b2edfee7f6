"""Each test of apex leaves this process as it found it: no region of O1, no kernels, no registrations."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accelcore import precision
from accelcore.apex import amp

sys.path.insert(0, str(Path(__file__).parent))  # where tests find what they share


@pytest.fixture(autouse=True)
def _as_before():
    yield
    amp.reset()
    precision.reset()

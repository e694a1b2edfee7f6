"""The conformance suite on hostchip."""

import pytest

import accelcore
from accelcore.testing import *


@pytest.fixture
def accel():
    return accelcore.select("hostchip")

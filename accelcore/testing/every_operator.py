"""Test module with all of torch's operators, which `accelcore verify backend NAME --deep` adds to the suite."""

from __future__ import annotations

from typing import Any

import pytest

from accelcore import Backend
from accelcore.testing.suite.operators import PARTS, check, check_options
from accelcore.testing.support.samples import SAMPLED, operators
from accelcore.testing.support.usable import DeviceTests


class TestOperators(DeviceTests):
    """Operators that the default run skips."""

    @pytest.mark.parametrize("name", sorted(operators().keys() - set(SAMPLED)))
    def test_operator(self, accel: Backend, name: str, record_property: Any) -> None:
        """Values and gradients are those of float64 on the CPU: in any layout, in place, with `out=`, empty."""
        check(accel, name, 4, record_property)

    @pytest.mark.parametrize("part", range(PARTS))
    def test_all_options(self, accel: Backend, part: int, record_property: Any) -> None:
        """Each operator is that of float64 on the CPU, with each of its options and pairs of them, in all forms."""
        check_options(accel, part, record_property, deep=True)

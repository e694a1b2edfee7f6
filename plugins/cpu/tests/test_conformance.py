"""The conformance suite on the CPU: the contracts of these roles, of which `tests/` has what the suite does not say."""

from __future__ import annotations

from accelcore.testing import TestPrecision, TestRuntime, TestScaler

__all__ = ["TestPrecision", "TestRuntime", "TestScaler"]

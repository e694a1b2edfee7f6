"""All of the suite in one module, which is what `accelcore verify` gives to pytest."""

from accelcore.testing import (
    TestBackend,
    TestCollectives,
    TestCompiler,
    TestOptimizers,
    TestParallel,
    TestPrecision,
    TestRuntime,
    TestScaler,
    TestTraining,
)

__all__ = [
    "TestBackend",
    "TestCollectives",
    "TestCompiler",
    "TestOptimizers",
    "TestParallel",
    "TestPrecision",
    "TestRuntime",
    "TestScaler",
    "TestTraining",
]

"""Conformance suite: tests that the author of a backend runs.

A test module of two statements runs all of it::

    import accelcore, pytest
    from accelcore.testing import *

    @pytest.fixture
    def accel():
        return accelcore.select("mydevice")

Everything that `accel.capabilities` declares is tested. Other features must raise `UnsupportedError`: the test is then
skipped as "not declared"; if the feature works all the same, the test fails. `accelcore verify backend mydevice` runs
the same tests without a test module and prints a scorecard.

Ranks are child processes that select the backend by its name, so it must be installed.

In `suite` is a class of tests for each role; in `support`, what tests share, such as samples and oracles. Tests of
accelcore itself do not belong here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelcore.testing.suite.backend import TestBackend
    from accelcore.testing.suite.collectives import TestCollectives
    from accelcore.testing.suite.compiler import TestCompiler
    from accelcore.testing.suite.operators import TestOperators
    from accelcore.testing.suite.optimizers import TestOptimizers
    from accelcore.testing.suite.parallel import TestParallel
    from accelcore.testing.suite.precision import TestPrecision
    from accelcore.testing.suite.runtime import TestRuntime
    from accelcore.testing.suite.scaler import TestScaler
    from accelcore.testing.suite.training import TestTraining

__all__ = [
    "TestBackend",
    "TestCollectives",
    "TestCompiler",
    "TestOperators",
    "TestOptimizers",
    "TestParallel",
    "TestPrecision",
    "TestRuntime",
    "TestScaler",
    "TestTraining",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'accelcore.testing' has no attribute {name!r}")
    # Ranks, which import this package, need neither the tests nor pytest.
    return getattr(import_module(f"accelcore.testing.suite.{name.removeprefix('Test').lower()}"), name)

"""Backends that lie: the CPU's, each with one promise broken, and the test of the suite that must notice.

As a plugin (see `test_lies.py`) this package offers each lie as a backend of that name.
"""

from __future__ import annotations

from lies import (  # noqa: F401  # each adds its own to LIES
    collectives,
    compiler,
    contexts,
    kernels,
    operators,
    optimizers,
    places,
    precision,
    rare,
    runtime,
    scaler,
    steps,
    training,
    unsampled,
    usual,
    verify,
)
from lies.lie import LIES, Lie  # noqa: F401

globals().update(LIES)

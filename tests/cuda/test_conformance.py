"""The conformance suite, on a GPU."""

from __future__ import annotations

from accelcore.testing import *  # noqa: F403

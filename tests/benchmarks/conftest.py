"""The benchmarks are no part of what is installed: they are imported from the tree."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))


@pytest.fixture(autouse=True, scope="module")
def _garbage_is_left():
    """To look for it takes long in a large process, and no time is judged here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gc.collect", int)
        yield

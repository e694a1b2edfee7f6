"""How every run of tests begins."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let the workers of pytest-xdist fork from one server: it takes seconds to import what forks need."""
    if "forks" in sys.modules:
        node.workerinput["forks"] = sys.modules["forks"].share()


def pytest_configure(config: pytest.Config) -> None:
    """In a worker, use that server."""
    if shared := getattr(config, "workerinput", {}).get("forks"):
        sys.modules["forks"].join(*shared)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected lives until the end: to look through it for garbage takes seconds, each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()

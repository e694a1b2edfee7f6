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


@pytest.fixture(autouse=True, scope="session")
def _no_seeds_for_absent_devices() -> Iterator[None]:
    """torch.manual_seed keeps the lines that called it for each kind of device that is absent: a millisecond a call."""
    with pytest.MonkeyPatch.context() as patch:
        if torch := sys.modules.get("torch"):
            for device in (torch.cuda, torch.mtia, torch.xpu):
                if not device.is_available():
                    patch.setattr(device, "manual_seed_all", lambda seed: None, raising=False)
        yield

"""Tests of the built documentation: `pytest docs/tests --site FOLDER`. They need what builds it, and no torch."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--site", type=Path, required=True, help="the folder that sphinx-build has written")


@pytest.fixture(scope="session")
def site(request):
    folder = request.config.getoption("--site").resolve()
    assert (folder / "index.html").exists(), f"there is no documentation in {folder}"
    return folder

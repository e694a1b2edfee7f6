from __future__ import annotations

import importlib.util
import platform
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts/set_up.py"


@pytest.fixture
def said(monkeypatch, capsys):
    """What `make train` says before it downloads, on another machine."""

    def said(*, machine, torch=False, gpu=False):
        spec = importlib.util.spec_from_file_location("set_up", SCRIPT)
        set_up = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(set_up)
        monkeypatch.setattr(platform, "system", lambda: "Linux")
        monkeypatch.setattr(platform, "machine", lambda: machine)
        monkeypatch.setattr(set_up, "find_spec", lambda name: object() if torch else None)
        monkeypatch.setattr(Path, "exists", lambda path: gpu)
        set_up.main()
        return capsys.readouterr().out

    return said


def test_the_size_is_said_and_the_smaller_build_named_where_there_is_no_gpu(said):
    without, with_gpu = said(machine="x86_64"), said(machine="x86_64", gpu=True)
    assert "several GB" in without
    assert "several GB" in with_gpu
    assert "CPU build is enough" in without
    assert "pytorch.org" in without
    assert "CPU build" not in with_gpu


def test_where_pip_has_the_cpu_build_or_torch_is_there_nothing_large_is_announced(said):
    assert "GB" not in said(machine="aarch64")
    assert "in it already" in said(machine="x86_64", torch=True)

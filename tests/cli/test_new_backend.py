"""`accelcore new-backend`: what it writes, and what it refuses. tests/examples/test_third_party.py uses the result."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelcore.cli import main
from accelcore.cli.commands import write_backend
from accelcore.errors import ConfigurationError

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party"


def files(folder):
    paths = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def test_the_example_is_what_it_writes(tmp_path):
    written = files(write_backend("hostchip", tmp_path / "new"))
    kept = files(EXAMPLE)
    assert written == {name: kept[name] for name in written}


def test_the_name_and_the_device_are_everywhere(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new-backend", "my_chip2", "--torch-device", "xpu"]) == 0
    assert "accelcore verify backend my_chip2" in capsys.readouterr().out
    written = files(tmp_path / "accelcore-my_chip2")
    assert {"pyproject.toml", "accelcore_my_chip2/backend.py", "tests/test_lion.py"} <= set(written)
    assert not any("hostchip" in name + text for name, text in written.items())
    assert 'device = "xpu"' in written["accelcore_my_chip2/backend.py"]
    for name, text in written.items():
        if name.endswith(".py"):
            compile(text, name, "exec")


@pytest.mark.parametrize("name", ["", "My-chip", "2chip", "auto", "class", "a" * 33, "../up", "chip\n", "cpu", "npu"])
def test_a_name_that_cannot_be_used_writes_nothing(tmp_path, name):
    with pytest.raises(ConfigurationError, match="name"):
        write_backend(name, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_backend_that_is_installed_is_refused(tmp_path, fakes):
    fakes.backend("present")
    with pytest.raises(ConfigurationError, match="'present' exists"):
        write_backend("present", tmp_path / "new")


def test_a_folder_that_exists_is_left_as_it_is(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine").write_text("mine")
    assert main(["new-backend", "mychip", "--folder", str(tmp_path / "mine")]) == 64
    assert "exists" in capsys.readouterr().err
    assert files(tmp_path) == {"mine": "mine"}

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelcore_lint.lint_command import lint
from click.testing import CliRunner, Result


class Run:
    """The command, in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def __call__(self, *arguments: str, **options: Any) -> Result:
        done = CliRunner().invoke(lint, arguments, standalone_mode=False, catch_exceptions=False, **options)
        done.exit_code = done.return_value if done.exit_code == 0 and done.return_value else done.exit_code
        return done


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("")
    return Run(tmp_path)

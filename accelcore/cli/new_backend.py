"""`accelcore new-backend NAME`: write the package of a backend, from the files in `template`.

The template is a backend called `hostchip`. `examples/third_party` is what it makes of that name.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
import tempfile
from importlib.resources import files
from pathlib import Path

from accelcore.devices import plugins
from accelcore.devices.plugins import declared, own_plugins
from accelcore.errors import ConfigurationError
from accelcore.util.text import shown

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}", re.ASCII)
_OLD = "hostchip"
_PLACES = {
    "README.md": "",
    "pyproject.toml": "",
    "__init__.py": "accelcore_{name}",
    "backend.py": "accelcore_{name}",
    "lion.py": "accelcore_{name}",
    "test_conformance.py": "tests",
    "test_lion.py": "tests",
}
"""Folder of each file."""


def write_backend(name: str, folder: Path | None = None, *, torch_device: str = "cpu") -> Path:
    """Write the package, all of it or nothing, to a new folder, by default `accelcore-NAME` here; return the folder."""
    _check(name, torch_device)
    folder = Path(f"accelcore-{name}") if folder is None else folder
    if folder.exists():
        raise ConfigurationError(f"{folder} exists", remedy="name another folder with --folder, or remove it")
    draft = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        for file, place in _PLACES.items():
            path = draft / place.format(name=name) / file
            path.parent.mkdir(exist_ok=True)
            text = (files("accelcore.cli") / "template" / f"{file}.txt").read_text(encoding="utf-8").replace(_OLD, name)
            text = text.replace('device = "cpu"', f'device = "{torch_device}"')
            path.write_text(text, encoding="utf-8")
        draft.chmod(0o755)  # mkdtemp lets nobody else read it
        draft.rename(folder)
    except OSError as error:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
        raise ConfigurationError(
            f"{folder} cannot be written", why=str(error), remedy="name another folder with --folder"
        ) from error
    return folder


def _check(name: str, torch_device: str) -> None:
    taken = {entry.name for entry in declared(plugins.BACKENDS)} | own_plugins().keys()
    for what, word in (("name", name), ("--torch-device", torch_device)):
        if not _NAME.fullmatch(word) or keyword.iskeyword(word) or word == "auto":
            raise ConfigurationError(
                f"{what} {shown(word)} is not a device's name",
                why="it must be a-z, then a-z, 0-9 or _, at most 32 characters, and not auto or a word of Python",
                remedy="choose another, such as mychip",
            )
    if name in taken:
        raise ConfigurationError(
            f"the backend {name!r} exists", remedy=f"choose another name than {', '.join(sorted(taken))}"
        )
    if importlib.util.find_spec(f"accelcore_{name}") is not None:
        raise ConfigurationError(
            f"the package accelcore_{name} is installed", why="it has another purpose", remedy="choose another name"
        )

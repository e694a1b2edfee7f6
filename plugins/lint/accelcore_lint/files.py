"""Find the files to lint, and read them. Nothing is imported, and no link to a folder is followed."""

from __future__ import annotations

import io
import os
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from accelcore_lint.settings import Settings

LARGEST = 2 * 1024 * 1024
"""Files of more bytes are not linted: they are generated."""

_TOOLS = {"__pycache__", "build", "dist", "node_modules", "site-packages", "venv", "env"}
_VENDORED = {"_vendor", "vendor", "vendored", "third_party", "thirdparty", "3rdparty"}
_SUFFIXES = (".py", ".pyi", ".ipynb")


class Problem(Exception):  # noqa: N818  # not an error of the linter: a file that is not linted, and why
    """A file cannot be linted."""


@dataclass
class Search:
    """Search of files; `notes` says which folders were skipped, though they hold code of somebody."""

    settings: Settings
    notes: list[str]

    def files(self, paths: Sequence[Path]) -> Iterator[Path]:
        """Yield the files that are named, and the scripts and notebooks in folders that are named; each once.

        Raises:
            click.ClickException: a path does not exist.
        """
        seen: set[Path] = set()
        for path in paths:
            if not path.exists() and not path.is_symlink():
                raise click.ClickException(
                    f"{shown(path)}: there is no such file or folder\n  what to do: correct the path"
                )
            for file in self._under(path) if path.is_dir() else [path]:
                if file not in seen and not self.settings.excludes(file):
                    seen.add(file)
                    yield file

    def _under(self, folder: Path) -> Iterator[Path]:
        def unreadable(error: OSError) -> None:
            self.notes.append(f"{shown(error.filename)} is not linted: {error.strerror}")

        for root, folders, names in os.walk(folder, onerror=unreadable):
            here = Path(root)
            folders[:] = sorted(name for name in folders if self._enters(here / name))
            yield from (here / name for name in sorted(names) if name.endswith(_SUFFIXES))

    def _enters(self, folder: Path) -> bool:
        if folder.name in _VENDORED:
            self.notes.append(f"{shown(folder)} is not linted: it holds code of others; name it to lint it")
            return False
        hidden = folder.name.startswith(".") or folder.name in _TOOLS
        return not hidden and not folder.is_symlink() and not self.settings.excludes(folder)


def read(path: Path) -> bytes:
    """Return a file's bytes.

    Raises:
        Problem: it cannot be read, is no regular file, or is too large.
    """
    try:
        if not path.is_file():
            path.stat()  # says why, if it cannot be reached
            raise Problem("it is not a regular file")
        size = path.stat().st_size
        if size > LARGEST:
            raise Problem(f"it has {size} bytes, more than {LARGEST}: it is taken for a generated file")
        return path.read_bytes()
    except OSError as error:
        raise Problem(f"it cannot be read: {error.strerror or error}") from error


def decode(data: bytes) -> str:
    """Return the text of a Python file, by its own declaration of the encoding.

    Raises:
        Problem: it is not in that encoding, or the encoding is unknown.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise Problem(f"it cannot be decoded ({error}): convert it to UTF-8, or declare its encoding") from error


def shown(path: object) -> str:
    """Return a path for a terminal: whatever its characters, it stays on its line."""
    text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else str(path)
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)

"""Files of a port: find them, read them exactly, and replace them as a whole or not at all."""

from __future__ import annotations

import codecs
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_LARGEST = 2**20
_COOKIE = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_SKIPPED = {"__pycache__", "site-packages", "node_modules", "build", "dist", "venv"}


class FileError(Exception):
    """A file that cannot be read or written; the message names it, the reason and the remedy."""


@dataclass(frozen=True)
class Script:
    """A file as it was read.

    Attributes:
        path: as the user gave it, or found in a folder that the user gave.
        content: its bytes, by which `write_script` notices that it has changed.
        source: its text, with its own line ends and without a byte order mark.
    """

    path: Path
    content: bytes
    source: str


def find_scripts(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the files that are named, and the `.py` files in the folders that are named, sorted and each once.

    Hidden folders, environments and build folders are skipped. Links to folders are not followed.

    Raises:
        FileError: a path does not exist.
    """
    seen = set()
    for path in paths:
        if not path.exists():
            raise FileError(f"{path}: there is no such file or folder\n  what to do: correct the path")
        for found in _walk(path) if path.is_dir() else [path]:
            key = found.resolve()
            if key not in seen:
                seen.add(key)
                yield found


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("."))
        yield from (Path(root, name) for name in sorted(names) if name.endswith(".py"))


def read_script(path: Path) -> Script:
    """Read a script.

    Raises:
        FileError: it cannot be read, is no regular file, is larger than 1 MiB, or is not in UTF-8.
    """
    try:
        if not path.is_file():
            raise FileError(f"{path} is not a regular file: give a Python script")
        if path.stat().st_size > _LARGEST:
            raise FileError(f"{path} is larger than {_LARGEST} bytes: nobody writes such scripts by hand")
        content = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error
    for line in content.splitlines()[:2]:
        cookie = _COOKIE.match(line)
        if cookie and codecs_name(cookie[1].decode("ascii")) not in ("utf-8", "ascii"):
            raise FileError(f"{path} declares the encoding {cookie[1].decode('ascii')}: convert it to UTF-8 first")
    try:
        source = content.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not in UTF-8 ({error.reason} at byte {error.start}): convert it first") from error
    return Script(path, content, source)


def codecs_name(name: str) -> str:
    """Return Python's own name of an encoding; the name itself if it is unknown."""
    try:
        return codecs.lookup(name).name
    except LookupError:
        return name


def write_script(script: Script, source: str, within: Sequence[Path]) -> None:
    """Replace a script atomically by another source. Its permissions and its byte order mark stay.

    Args:
        script: as it was read.
        source: the new source.
        within: the paths that the user named. A link that leads out of them is refused.

    Raises:
        FileError: the file has changed since it was read, is a link that leads elsewhere, or cannot be written.
    """
    target = script.path.resolve()
    roots = [path.resolve() if path.is_dir() else path.parent.resolve() for path in within]
    if not any(target.is_relative_to(root) for root in roots):
        raise FileError(f"{script.path} is a link to {target}, outside of what you named: name that file itself")
    mark = codecs.BOM_UTF8 if script.content.startswith(codecs.BOM_UTF8) else b""
    temporary = None
    try:
        mode = stat.S_IMODE(target.stat().st_mode)
        if not os.access(target, os.W_OK):
            raise FileError(f"{script.path} is write-protected: change its permissions, or take the diff")
        with tempfile.NamedTemporaryFile("wb", dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(mark + source.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(mode)
        if target.read_bytes() != script.content:
            raise FileError(f"{script.path} has changed while it was ported: run the command again")
        temporary.replace(target)
        temporary = None
    except OSError as error:
        raise FileError(f"{script.path} cannot be written: {error.strerror}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)

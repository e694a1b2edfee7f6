"""Files of a project: which folder is its root, which scripts it has, and which files one imports."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from accelcore_lint.port.files import find_scripts
from accelcore_lint.port.rule import TODO
from accelcore_lint.port.syntax import without_comments

IMPORT = re.compile(r"(?m)^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]*)|import[ \t]+([^\n#]+))")
"""Lines that import: what stands after `from`, the names, and what stands after a plain `import`."""

_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg", "requirements.txt", "README.md")
_ABOVE = 4
"""How many folders around a file may be the one from which it imports."""
_MOST = 3000
"""How many files of a project are read beside those that are ported."""


def root_of(path: Path) -> tuple[Path, bool]:
    """Return the folder of a file's project, and whether that is certain: it has a mark of one, such as `.git`."""
    for folder in list(path.parents)[:_ABOVE]:
        if any((folder / mark).exists() for mark in _MARKS):
            return folder, True
    return path.parent, False


def scripts_in(root: tuple[Path, bool]) -> Iterator[Path]:
    """Yield the scripts of a project; only those in the folder itself if it is not certain that this is a root."""
    folder, is_project = root
    try:
        found = find_scripts([folder]) if is_project else iter(sorted(folder.glob("*.py")))
        yield from itertools.islice((path for path in found if path.is_file()), _MOST)
    except OSError:
        return  # a folder that may not be listed has nothing to say


def text_in(path: Path) -> str:
    """Return the text of a file without its comments, but those of an earlier run; "" if it cannot be read."""
    try:
        return without_comments(path.read_bytes().decode("utf-8", "replace"), TODO)
    except OSError:
        return ""


def folders_above(path: Path) -> list[Path]:
    """Return the folders above that of a file from which it may import."""
    return list(path.parents)[1:_ABOVE]


def imported_by(path: Path, text: str, stems: set[str] | None) -> Iterator[tuple[Path, str]]:
    """Yield the files that a file imports, looked for in its folder and in those above it; if given, of these stems.

    Each with a name that the file takes from it, or by which it knows the module; `"*"` is all names.
    """
    for base, names, plain in IMPORT.findall(text):
        members = [part.split() for part in re.split(r"[,\s]*[,\n][,\s]*", names.strip("() \t\r\n")) if part.split()]
        modules = [(base, part[0]) for part in members] if base else []
        modules += [(f"{base.rstrip('.')}.{part[0]}", part[-1]) for part in members] if base else []
        modules += [(part.split()[0], part.split()[-1]) for part in plain.split(",") if part.split()]
        for module, name in modules:
            dots = len(module) - len(module.lstrip("."))
            parts = [part for part in module.split(".") if part]
            if stems is not None and (not parts or parts[-1] not in stems):
                continue
            above = [*folders_above(path), *(folder / "src" for folder in folders_above(path))]
            roots = [path.parents[dots - 1]] if 0 < dots <= len(path.parents) else [path.parent, *above]
            for root in roots if parts else ():
                base_path = root.joinpath(*parts)
                file = next(
                    (each for each in (base_path.with_suffix(".py"), base_path / "__init__.py") if each.is_file()), None
                )
                if file is not None:
                    yield file.resolve(), name
                    break

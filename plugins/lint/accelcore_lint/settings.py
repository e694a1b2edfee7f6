"""Settings of a run: `[tool.accelcore.lint]` of a pyproject.toml, and what the command line adds."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import Any

import click

from accelcore_lint.finding import Finding
from accelcore_lint.rules import RULES, UNKNOWN

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_KEYS = ("select", "ignore", "exclude", "per-file-ignores")


@dataclass(frozen=True)
class Settings:
    """Which rules count where.

    Attributes:
        folder: the folder of the pyproject.toml, to which its patterns are relative.
        select: codes that count.
        exclude: patterns of files and folders that are not linted.
        ignores: for a pattern of files, codes that do not count in them.
    """

    folder: Path
    select: frozenset[str] = frozenset({UNKNOWN, *RULES})
    exclude: tuple[str, ...] = ()
    ignores: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def excludes(self, path: Path) -> bool:
        """Return whether a file or folder is not to be linted."""
        return any(_matches(self._relative(path), pattern) for pattern in self.exclude)

    def counts(self, finding: Finding) -> bool:
        """Return whether a finding is to be reported."""
        path = self._relative(Path(finding.path))
        ignored = (ignored for pattern, ignored in self.ignores.items() if _matches(path, pattern))
        return finding.code in self.select and not any(finding.code in codes for codes in ignored)

    def _relative(self, path: Path) -> PurePath:
        absolute = Path.cwd() / path
        return absolute.relative_to(self.folder) if absolute.is_relative_to(self.folder) else path


def _matches(path: PurePath, pattern: str) -> bool:
    """Return whether a pattern matches a path, a folder above it, or, if it has no slash, any name in it."""
    parts = path.parts
    if "/" not in pattern.rstrip("/"):
        return any(fnmatch(part, pattern.rstrip("/")) for part in parts)
    whole = ("/".join(parts[: count + 1]) for count in range(len(parts)))
    return any(fnmatch(part, pattern.rstrip("/")) for part in whole)


def read(file: Path | None) -> Settings:
    """Return the settings of a pyproject.toml; by default of the nearest one, here or above.

    Raises:
        click.ClickException: it cannot be read, or a key or value is unknown.
    """
    if file is None:
        here = Path.cwd()
        nearest = (folder / "pyproject.toml" for folder in (here, *here.parents))
        file = next(filter(Path.is_file, nearest), None)
        if file is None:
            return Settings(here)
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{_shown(file)} cannot be read: {error}") from error
    table: Any = content
    for key in ("tool", "accelcore", "lint"):
        table = table.get(key, {}) if isinstance(table, dict) else None
    if not isinstance(table, dict):
        raise click.ClickException(f"{_shown(file)}: tool.accelcore.lint is not a table")
    return _settings(table, file)


def _settings(table: Mapping[str, Any], file: Path) -> Settings:
    where = f"{_shown(file)}, [tool.accelcore.lint]"
    unknown = [key for key in table if key not in _KEYS]
    if unknown:
        raise click.ClickException(f"{where}: unknown key {unknown[0]!a}; known are {', '.join(_KEYS)}")
    lists = {key: _texts(table.get(key, []), f"{where}, {key}") for key in _KEYS[:3]}
    per_file = table.get("per-file-ignores", {})
    if not isinstance(per_file, dict):
        raise click.ClickException(f"{where}, per-file-ignores: {per_file!r} is not a table of patterns and codes")
    ignores = {
        pattern: codes(_texts(value, f"{where}, per-file-ignores"), where) for pattern, value in per_file.items()
    }
    chosen = codes(lists["select"], where) if "select" in table else Settings.select
    folder = file.absolute().parent
    return Settings(folder, chosen - codes(lists["ignore"], where), tuple(lists["exclude"]), ignores)


def codes(words: Iterable[str], where: str) -> frozenset[str]:
    """Return the codes that begin with one of these words, such as `ACC1` or `ACC301`; `ALL` is every code.

    Raises:
        click.ClickException: no code begins with a word.
    """
    found: set[str] = set()
    for word in words:
        begin = "ACC" if word == "ALL" else word
        matching = {code for code in (UNKNOWN, *RULES) if begin and code.startswith(begin)}
        if not matching:
            raise click.ClickException(
                f"{where}: no rule has a code like {word!a}; write ALL, a family (ACC1, ACC2, ACC3), or one of "
                f"{', '.join(RULES)}"
            )
        found |= matching
    return frozenset(found)


def _texts(value: object, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise click.ClickException(f"{where}: {value!r} is not a list of strings")
    return value


def _shown(file: Path) -> str:
    return ascii(str(file))[1:-1]

"""Programs of a project: files that one process may import together, and what they set of cuDNN."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path

_SETTING = re.compile(
    r"\bcudnn(?:\.|[ \t]*,[ \t]*[\"'])(\w+)(?=[^=\n#;]*=(?!=)[ \t]*([^\n#;]*)|[\"'][ \t]*,[ \t]*([^\n)#;]*))"
)
"""`cudnn.benchmark = value`, also one of several targets, and `setattr(cudnn, "benchmark", value)`."""

_IMPORT = re.compile(r"(?m)^[ \t]*(?:from|import)[ \t][^\n#(]*(?:\([^)]*\))?")
_WORD = re.compile(r"\w+")
_BY_NAME = re.compile(
    r"\b(import_module|__import__|run_path|run_module|exec|spec_from_file_location|instantiate|locate)\("
)
"""Calls that may import a file that no import statement names."""


def settings_beside(paths: Collection[Path], texts: Mapping[Path, str]) -> dict[Path, frozenset[tuple[str, str]]]:
    """Return what the other files of a file's programs set of cuDNN, for those of `paths` that set something.

    An import is known by the name of the file alone, so that no folder on the path is missed.
    """
    made = {
        path: {(key, (one or other).strip()) for key, one, other in _SETTING.findall(text)}
        for path, text in texts.items()
    }
    made = {path: found for path, found in made.items() if found}
    asked = [path for path in paths if path in made]
    if not asked:
        return {}
    named: dict[str, list[Path]] = defaultdict(list)
    for path in texts:
        named[path.parent.name if path.stem == "__init__" else path.stem].append(path)
    imports = {path: _imports(text, named) for path, text in texts.items()}
    users: dict[Path, set[Path]] = defaultdict(set)
    for user, found in imports.items():
        for path in found:
            users[path].add(user)
    beside = {}
    for path in asked:
        programs = _reached(_reached({path}, users), imports)
        if any(_BY_NAME.search(texts[each]) for each in programs):
            programs = set(texts)
        beside[path] = frozenset(each for other in programs & set(made) - {path} for each in made[other])
    return beside


def _imports(text: str, named: Mapping[str, list[Path]]) -> set[Path]:
    lines = _IMPORT.findall(text.replace("\\\n", " "))
    return {path for line in lines for word in _WORD.findall(line) for path in named.get(word, ())}


def _reached(paths: set[Path], edges: Mapping[Path, set[Path]]) -> set[Path]:
    """Return some files with all that edges lead to from them."""
    found, new = set(paths), set(paths)
    while new := {path for each in new for path in edges.get(each, ())} - found:
        found |= new
    return found

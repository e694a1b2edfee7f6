"""Whether a file is a script that trains, or a library that others import."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

import libcst as cst

from accelcore_lint.port.processes import Processes
from accelcore_lint.port.rule import Level
from accelcore_lint.port.syntax import is_guard, text_of
from accelcore_lint.port.tree import WORD
from accelcore_lint.port.uses import uses_in

_TRAINS = re.compile(
    r"\b(DataLoader|load_state_dict|init_process_group|ArgumentParser|argv|hydra|click|fire|typer|tyro)\b|optim"
)
"""Words of scripts that train, evaluate or take options."""

_WORKS = re.compile(
    r"\b(torch|model|net\w*|loss|print|backward|DataLoader|load_state_dict|init_process_group|hydra|click|fire|typer)\b"
)
"""Words of lines that do the work of a script."""

_RECORDS = re.compile(
    r"(^|[._])((add|register|set|use|enable|disable|insert|update|append|extend|filter|simple|basic|parse|merge|freeze)"
    r"(_\w+|[A-Z]\w*|warnings|filter)?|(manual_)?seed(_\w+)?)$"
)
"""Functions that a module without a script calls when it is imported: they register something, or set it."""


class ScriptOrLibrary(Processes):
    """A file with what it does when it runs, and when it is imported."""

    @cached_property
    def has_guard(self) -> bool:
        """Return whether the file has an `if __name__ == "__main__":`, so that others may import it, too."""
        return any(map(is_guard, self.module.body))

    @cached_property
    def is_library(self) -> bool:
        """Return whether a file defines what others use, so that it must choose no device when it is imported.

        It does so if another file imports it, or if it certainly does not train, evaluate or take options itself.
        """
        if self.known.imported and (self.level is Level.TORCH or not (self.spawns or self.backends)):
            return True
        if self.spawns or self.backends:
            return False
        if self.has_guard:
            return not _TRAINS.search(self._run)
        own = set(self.defined)
        return bool(own) and not any(self._runs(line, own) for line in _lines(self.module))

    @cached_property
    def may_ask_on_import(self) -> bool:
        """Return whether a script of the project imports the file, and no file hides devices or starts processes."""
        return self.known.imported and "early" not in self.known.uses | frozenset(uses_in(self.code))

    @cached_property
    def _run(self) -> str:
        """Return the lines that the file runs as a script: its own, and functions and classes that these name."""
        found = "".join(
            text_of(line)
            for each in self.module.body
            if not isinstance(each, (cst.FunctionDef, cst.ClassDef))
            for line in (each.body if isinstance(each, cst.SimpleStatementLine) else [each])
            if not isinstance(line, (cst.Import, cst.ImportFrom))
        )
        return found + self.reached(WORD.findall(found))[1]

    def _runs(self, line: cst.CSTNode, own: set[str]) -> bool:
        """Return whether a line of the module does the work of a script, and not only registers or sets something.

        `own`: the functions and classes of the module.
        """
        if isinstance(line, (cst.For, cst.While, cst.With)):
            return bool(own & self.names_in(line)) or _WORKS.search(text_of(line)) is not None
        for part in line.body if isinstance(line, (cst.SimpleStatementLine, cst.SimpleStatementSuite)) else ():
            value = getattr(part, "value", None)
            if not isinstance(value, cst.Call):
                continue
            used = self.names_in(value)
            if not isinstance(part, cst.Expr):
                if used & own and _WORKS.search(self._run):
                    return True
            elif not _RECORDS.search(text_of(value.func)):
                known = {name for name in self.assigned if not name.startswith(("log", "current_"))}
                if used & (own | known):
                    return True
        return False


def _lines(block: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield the lines that run when a module is imported, also those under an `if` or in a `try`."""
    if isinstance(block, cst.If):
        yield from _lines(block.body)
        if block.orelse is not None:
            yield from _lines(block.orelse)
    elif isinstance(block, (cst.Try, cst.Else)):
        yield from _lines(block.body)
    elif isinstance(block, (cst.Module, cst.IndentedBlock)):
        for line in block.body:
            yield from _lines(line)
    else:
        yield block

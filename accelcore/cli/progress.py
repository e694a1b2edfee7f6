"""How far a suite in another process has come, on stderr: a line that is rewritten, or on no terminal one a role."""

from __future__ import annotations

import shutil
import sys

__all__ = ["Progress"]


class Progress:
    """Shows how many tests have ended, and which is under way."""

    def __init__(self) -> None:
        self._role = ""
        self._rewrites = sys.stderr.isatty()

    def show(self, done: int, count: int, role: str, what: str) -> None:
        """Say that `done` of `count` tests have ended, and that one of `role`, which asks `what`, is under way."""
        line = f"{done} of {count} tests  {role}"
        if self._rewrites:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r{f'{line}: {what}'[:width]:{width}}")
        elif role != self._role:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
        self._role = role

    def end(self) -> None:
        """Leave the line as if nothing had been shown."""
        if self._rewrites and self._role:
            sys.stderr.write(f"\r{'':{shutil.get_terminal_size().columns - 1}}\r")
            sys.stderr.flush()

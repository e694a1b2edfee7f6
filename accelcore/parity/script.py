"""Program that runs a script of others and records or replays it: `accelcore record` and `replay` start it.

Its arguments: `record` or `replay`; the folder; the options of `Record` or `Replay` as JSON; the script and its own
arguments.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from os.path import dirname, realpath
from time import monotonic
from typing import Any

from accelcore.errors import AccelError
from accelcore.parity.record import Record
from accelcore.parity.replay import Replay

__all__ = ["main"]

_INVALID = 64  # the exit code of a request that is invalid, as of every command
_EVERY = 5.0  # seconds between two lines of progress


def main() -> None:
    """Run the script in the context of a `Record` or a `Replay`."""
    mode, folder, options, *sys.argv = sys.argv[1:]
    script = sys.argv[0]
    if not getattr(sys.flags, "safe_path", False):  # Python has put the folder of this file there
        sys.path[0] = dirname(realpath(script))
    context = _Recorded if mode == "record" else _Replayed
    code = _INVALID
    try:
        with context(folder, **json.loads(options)):
            code = 1
            _run(script)
    except AccelError as error:
        sys.stderr.write(f"accelcore: {error}\n")
        sys.exit(code)


def _run(script: str) -> None:
    """Run the script; a plain end by `sys.exit()` or after enough steps is an end as any other."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


class _Progress:
    """Lines on stderr that show how far a recording is."""

    def __init__(self, word: str) -> None:
        self._word, self._next = word, monotonic() + _EVERY

    def show(self, step: int, last: int | None) -> None:
        if monotonic() >= self._next:
            of = "" if last is None else f" of {last}"
            sys.stderr.write(f"accelcore: {step}{of} steps {self._word}\n")
            self._next = monotonic() + _EVERY


def _shown(base: type[Any], word: str) -> Callable[..., Any]:
    """Return a class that shows its progress, and ends the script after the last step that was asked for."""

    class Shown(base):  # type: ignore[misc]  # one of two
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._progress = _Progress(word)

        def _step_ended(self, step: int) -> None:
            self._progress.show(step, self._steps)

        def _ended(self) -> None:
            sys.exit(0)

    return Shown


_Recorded, _Replayed = _shown(Record, "recorded"), _shown(Replay, "replayed")


if __name__ == "__main__":
    main()

"""Loops written by hand, in a process in which torch is as it comes: nothing of accelcore's is loaded there.

A backend may put better kernels in place of torch's, which a loop by hand in the same process would get as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from multiprocessing import get_context
from time import process_time
from types import TracebackType
from typing import Any

__all__ = ["TorchAlone"]

Step = Callable[[], object]


class TorchAlone(AbstractContextManager["TorchAlone"]):
    """A child process with cases of its own, each called from here as if it were one of ours.

    Args:
        make: called in the child, makes its cases; has to be a function that can be pickled.
        arguments: of `make`.
    """

    def __init__(self, make: Callable[..., Mapping[str, Step]], *arguments: Any) -> None:
        context = get_context("spawn")
        self._seconds = context.Value("d", 0.0)
        self._ours, theirs = context.Pipe()
        self._child = context.Process(target=_serve, args=(theirs, self._seconds, make, arguments), daemon=True)
        self._child.start()
        theirs.close()
        names = self._ours.recv()
        self.cases: Mapping[str, Step] = {name: self._caller(name) for name in names}

    def clock(self) -> float:
        """Processor time of both processes: a case runs in one of them, while the other waits."""
        return process_time() + float(self._seconds.value)

    def _caller(self, name: str) -> Step:
        def call() -> None:
            self._ours.send(name)
            self._ours.recv()  # EOFError where the child has failed, which says why by itself

        return call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ours.close()  # the child ends by that
        self._child.join()


def _serve(pipe: Any, seconds: Any, make: Callable[..., Mapping[str, Step]], arguments: tuple[Any, ...]) -> None:
    cases = make(*arguments)
    pipe.send(list(cases))
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        began = process_time()
        cases[name]()
        seconds.value += process_time() - began
        pipe.send(None)

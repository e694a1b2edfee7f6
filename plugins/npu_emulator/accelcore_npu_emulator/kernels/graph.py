"""Graph capture: the kernels of a capture are written to a tape, and a replay runs the tape over the same memory."""

from __future__ import annotations

import ctypes
import traceback
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

__all__ = ["Recorder", "Tape"]

_BEGIN, _END, _EXECUTE, _DESTROY, _COPY, _FILL = range(6)


class Tape:
    """One captured graph.

    On hardware a capture executes nothing. Here its kernels do run, because their shapes must be known; when it ends,
    the native half puts all memory back to what it was before.
    """

    def __init__(self) -> None:
        self.draws: list[tuple[Tensor, Tensor, int]] = []  # the seed, the offset, and what is added to it
        self._steps: list[Callable[[], object]] = []

    def append(self, step: Callable[[], object]) -> None:
        """Record one kernel."""
        self._steps.append(step)

    def replay(self) -> None:
        """Run every recorded kernel again."""
        for step in self._steps:
            step()


class Recorder:
    """The tapes of this process, and the one that is being recorded."""

    def __init__(self) -> None:
        self.tape: Tape | None = None
        self.recorded: Iterator[tuple[Tensor, Tensor, int]] | None = None  # the draws of the graph that is replayed
        self._tapes: dict[int, Tape] = {}

    def run(self, step: Callable[[], object]) -> None:
        """Execute a kernel that only writes to memory that exists, and record it where a graph is captured."""
        if self.tape is not None:
            self.tape.append(step)
        step()

    def handle(self, what: int, a: int, b: int, n: int) -> int:
        """Serve the native half's graph calls; non-zero says that one failed."""
        try:
            with torch.no_grad():
                self._handle(what, a, b, n)
        except Exception:  # noqa: BLE001  the caller is C code: it gets a status, the reader the traceback
            traceback.print_exc()
            return 1
        return 0

    def _handle(self, what: int, a: int, b: int, n: int) -> None:
        if what == _BEGIN:
            self.tape = self._tapes[a] = Tape()
        elif what == _END:
            self.tape = None
        elif what == _EXECUTE:
            self.recorded = iter(self._tapes[a].draws)
            try:
                self._tapes[a].replay()
            finally:
                self.recorded = None
        elif what == _DESTROY:
            self._tapes.pop(a, None)
        elif what == _COPY and self.tape is not None:
            self.tape.append(lambda: ctypes.memmove(a, b, n))
        elif what == _FILL and self.tape is not None:
            self.tape.append(lambda: ctypes.memset(a, b, n))

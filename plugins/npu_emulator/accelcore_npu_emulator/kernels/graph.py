"""Graph capture: a capture records kernels on a tape, and a replay runs the tape on the same memory."""

from __future__ import annotations

import ctypes
import traceback
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BEGIN, _END, _EXECUTE, _DESTROY, _COPY, _FILL = range(6)


class Tape:
    """One captured graph.

    On hardware a capture executes nothing. Here its kernels run to determine their shapes; afterwards the native half
    restores all memory.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []
        self._draws: list[tuple[torch.Generator, int]] = []  # and how far from the graph's first draw
        self._drawn: dict[torch.Generator, int] = {}  # how much a replay draws, by the last draw
        self._numbers: Iterator[tuple[torch.Generator, int]] = iter(())

    def append(self, step: Callable[[], object]) -> None:
        """Record one kernel."""
        self._steps.append(step)

    def add_draw(self, generator: torch.Generator, offset: int, end: int) -> None:
        """Record that a kernel draws from `offset` to `end`, both counted from the beginning of the graph."""
        self._draws.append((generator, offset))
        self._drawn[generator] = max(end, self._drawn.get(generator, 0))

    def next_draw(self) -> tuple[torch.Generator, int]:
        """Return the generator and offset of the next kernel that draws in a replay."""
        return next(self._numbers)

    def replay(self) -> None:
        """Run every recorded kernel again."""
        # torch_npu has advanced the generators by all that the graph draws.
        begin = {generator: generator.get_offset() - drawn for generator, drawn in self._drawn.items()}
        if min(begin.values(), default=0) < 0:
            raise RuntimeError(
                "EMULATED: a captured graph drew random numbers from a generator that is not registered with it: "
                "call register_generator_state() of the graph before the capture"
            )
        self._numbers = iter([(generator, begin[generator] + offset) for generator, offset in self._draws])
        for step in self._steps:
            step()


class Recorder:
    """Tapes of this process, and the tape that is being recorded."""

    def __init__(self) -> None:
        self.tape: Tape | None = None
        self.replayed: Tape | None = None
        self._tapes: dict[int, Tape] = {}

    def run(self, step: Callable[[], object]) -> None:
        """Execute a kernel that only writes to existing memory, and record it if a graph is being captured."""
        if self.tape is not None:
            self.tape.append(step)
        step()

    def handle(self, what: int, a: int, b: int, n: int) -> int:
        """Serve the native half's graph calls; return non-zero if one failed."""
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
            self.replayed = self._tapes[a]
            try:
                self.replayed.replay()
            finally:
                self.replayed = None
        elif what == _DESTROY:
            self._tapes.pop(a, None)
        elif what == _COPY and self.tape is not None:
            self.tape.append(lambda: ctypes.memmove(a, b, n))
        elif what == _FILL and self.tape is not None:
            self.tape.append(lambda: ctypes.memset(a, b, n))

"""Which rank of a job is missing where a collective fails, and where it is: by the notes that all of them leave."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError

from accelcore.causes import causes
from accelcore.errors import DistributedError
from accelcore.roles.notes import BEAT, Note, Notes, line_of, ranks

__all__ = ["Whereabouts"]

_SILENT = 3.0
"""Seconds without a note after which a rank is taken for ended."""

_LOST = re.compile(
    r"\.cc:\d+\] .*(timed out|closed|reset|refused|broken pipe)|timeout caused pair closure|monitoredBarrier",
    re.IGNORECASE,
)
"""What the error of a collective says where ranks have lost each other and torch has no class for it."""

_NAMED = 4
"""Of how many ranks a message says where they are."""


class Whereabouts:
    """Knows where the ranks of a job are. Made in the thread that trains.

    Args:
        store: the job's, of torch.distributed, which all ranks reach.
        rank, world_size: this rank, and of how many.
        steps: the step of each trainer of this rank, by its number.
    """

    def __init__(self, store: Any, rank: int, world_size: int, steps: Mapping[int, int]) -> None:
        self._rank, self._world_size = rank, world_size
        self._notes = Notes(store, rank, world_size, steps)
        self._explained = False

    def leave(self, timeout: timedelta) -> None:
        """Wait until all ranks are done, so that none loses what another holds for it.

        Raises:
            DistributedError: another rank has failed, is in a step that this one never began, or is late.
        """
        store, keys = self._notes.store, {rank: f"done {rank}" for rank in range(self._world_size)}
        self._notes.done = True
        self._notes.write()
        store.set(keys[self._rank], "")
        begin, patience = time.monotonic(), BEAT
        while True:
            with suppress(RuntimeError):
                store.wait(list(keys.values()), timedelta(seconds=patience))
                return
            notes = self._notes.read()
            failed = _those(notes, lambda note: bool(note.failed))
            if failed:
                raise self._cannot_go_on(failed, notes)
            ahead = _those(notes, lambda note: sum(note.steps) > sum(self._notes.steps.values()))
            if ahead:
                raise DistributedError(
                    f"rank {self._rank} has ended its loop, and {ranks(ahead)} of its job did not",
                    why=_places([self._rank, *ahead], notes),
                    remedy="let all ranks take as many steps: read data through trainer.batches(loader)",
                )
            late = [rank for rank, key in keys.items() if not store.check([key])]
            if late and time.monotonic() - begin > timeout.total_seconds():
                raise DistributedError(
                    f"{ranks(late)} of this job did not come to its end",
                    why=_places(late, notes),
                    remedy="let all ranks leave `with accel.distributed():`, or give them longer by its timeout",
                )
            patience = min(2 * patience, 60.0)

    def explain(self, error: BaseException) -> DistributedError | None:
        """Who is missing, where that is why this rank has failed; the others learn of the failure. Once."""
        if self._explained:
            return None
        self._explained, explained = True, None
        self._notes.line = line_of(error)
        # Whatever a script makes of it; SystemExit is for the launcher, and KeyboardInterrupt for the user.
        lost = next(filter(_is_loss, causes(error)), None) if isinstance(error, Exception) else None
        if lost is not None:
            explained = self._blame(str(lost).strip().split("\n", 1)[0])
        lines = str(explained or error).splitlines()
        self._notes.failed = f"{type(explained or error).__name__}: {lines[0] if lines else ''}"
        with suppress(RuntimeError):  # the store is gone, and with it whoever would read this
            self._notes.write()
        return explained

    def close(self) -> None:
        """Leave no more notes."""
        self._notes.close()

    def _blame(self, why: str) -> DistributedError:
        try:
            notes, silent = self._ask()
        except RuntimeError:
            return DistributedError(
                "this rank has lost its job: the job's store is gone",
                why=why,
                remedy="see why rank 0, which holds it, or its launcher has ended",
            )
        others = {rank: note for rank, note in notes.items() if rank != self._rank}
        failed = _those(others, lambda note: bool(note.failed))
        if failed:
            return self._cannot_go_on(failed, notes, why)
        furthest = max(note.place for note in notes.values())
        for blamed, what in (
            (_those(others, lambda note: note.done), "left the job, which others have not"),
            (silent, "does not answer: its process has ended, or is stopped"),
            (_those(notes, lambda note: note.place < furthest), "did not join a collective that others wait in"),
        ):
            if blamed:
                return DistributedError(
                    f"{ranks(blamed)} of this job {what}",
                    why=f"{_places([*blamed[:_NAMED], self._rank], notes)}; {why}",
                    remedy="see what holds it up, or has ended it; where it only needs longer, say "
                    "accel.distributed(timeout=...)",
                )
        return DistributedError(
            "a collective failed, and all ranks of this job are there",
            why=f"{_places([*notes][:_NAMED], notes)}; {why}",
            remedy="see whether all ranks call the same collectives: accelcore run --check-collectives",
        )

    def _cannot_go_on(self, failed: Sequence[int], notes: Mapping[int, Note], why: str = "") -> DistributedError:
        error = DistributedError(
            f"{ranks(failed)} of this job failed, and the others cannot go on without it",
            why="; ".join(filter(None, [_places([*failed[:_NAMED], self._rank], notes), why])),
            remedy="see the traceback of that rank",
        )
        error.failed = tuple(failed)
        return error

    def _ask(self) -> tuple[dict[int, Note], list[int]]:
        """All notes, and the ranks that leave none any more; at once where one has failed."""
        self._notes.write()
        first, deadline = self._notes.read(), time.monotonic() + _SILENT
        while True:
            time.sleep(BEAT / 4)
            notes = self._notes.read()
            others = [rank for rank in range(self._world_size) if rank != self._rank]
            ended = [rank for rank in others if rank in notes and (notes[rank].done or notes[rank].failed)]
            silent = [rank for rank in others if rank not in ended and notes.get(rank) == first.get(rank)]
            failed = any(notes[rank].failed for rank in ended)
            if failed or not silent or time.monotonic() > deadline:
                return notes, silent


def _is_loss(error: BaseException) -> bool:
    """Whether a collective has failed because ranks have lost each other."""
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and bool(_LOST.search(str(error))))


def _those(notes: Mapping[int, Note], condition: Callable[[Note], bool]) -> list[int]:
    return [rank for rank, note in notes.items() if condition(note)]


def _places(of: Sequence[int], notes: Mapping[int, Note]) -> str:
    places = {rank: str(notes[rank]) if rank in notes else "has left no note" for rank in of}
    return "; ".join(f"rank {rank} {place}" for rank, place in places.items())

"""Name the rank that is missing if a collective fails, and its place in the script."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import DistError

from accelcore.errors import DistributedError
from accelcore.jobs.collectives import Collectives
from accelcore.jobs.rank_notes import BEAT, Note, RankNotes, line_of
from accelcore.util.text import ranks

__all__ = ["MissingRanks"]

_SILENT = 3.0
"""Seconds without a note after which a rank counts as ended."""

_LOST = re.compile(
    r"\.cc:\d+\] .*(timed out|closed|reset|refused|broken pipe)|timeout caused pair closure|monitoredBarrier",
    re.IGNORECASE,
)
"""Messages of collectives that lost a rank, for which torch has no class of error."""

_NAMED = 4
"""Number of ranks whose places a message tells."""


class MissingRanks:
    """Finds the ranks that are missing, from the notes of all ranks. Must be created in the thread that trains.

    Args:
        collectives: the job's role; torch.distributed's default group must exist.
        timeout: how long ranks wait for each other at the job's end.
    """

    def __init__(self, collectives: Collectives, timeout: timedelta) -> None:
        self._rank, self._world_size, self._timeout = collectives.rank, collectives.world_size, timeout
        self._steps = collectives.steps
        self._steps.clear()
        store = dist.distributed_c10d._get_default_store()
        self._notes = RankNotes(store, self._rank, self._world_size, self._steps)
        self._explained = False

    def leave(self) -> None:
        """Wait until all ranks are done, because a rank may need what another one holds.

        Raises:
            DistributedError: another rank has failed, is in a step that this rank never began, or is late.
        """
        store, keys = self._notes.store, {rank: f"done {rank}" for rank in range(self._world_size)}
        self._notes.done = True
        self._notes.write()
        store.set(keys[self._rank], "")
        begin, interval = time.monotonic(), BEAT
        while True:
            with suppress(RuntimeError):
                store.wait(list(keys.values()), timedelta(seconds=interval))
                return
            notes = self._notes.read()
            failed = _select(notes, lambda note: bool(note.failed))
            if failed:
                raise self._others_failed(failed, notes)
            ahead = _select(notes, lambda note: sum(note.steps) > sum(self._steps.values()))
            if ahead:
                raise DistributedError(
                    f"rank {self._rank} has ended its loop, and {ranks(ahead)} of its job did not",
                    why=_places([self._rank, *ahead], notes),
                    remedy="let all ranks take as many steps: read data through trainer.batches(loader)",
                )
            late = [rank for rank, key in keys.items() if not store.check([key])]
            if late and time.monotonic() - begin > self._timeout.total_seconds():
                raise DistributedError(
                    f"{ranks(late)} of this job did not come to its end",
                    why=_places(late, notes),
                    remedy="let all ranks leave `with accel.distributed():`, or raise its timeout",
                )
            interval = min(2 * interval, 60.0)

    def explain(self, error: BaseException) -> DistributedError | None:
        """If a lost rank caused `error`, return an error that names it, and tell the other ranks.

        Only the first call does anything; later ones return None.
        """
        if self._explained:
            return None
        self._explained, explained = True, None
        self._notes.line = line_of(error)
        # SystemExit is for the launcher, and KeyboardInterrupt for the user; a script may wrap any other error.
        lost = next(filter(_is_loss, _causes(error)), None) if isinstance(error, Exception) else None
        if lost is not None:
            explained = self._name_missing(str(lost).strip().split("\n", 1)[0])
        lines = str(explained or error).splitlines()
        self._notes.failed = f"{type(explained or error).__name__}: {lines[0] if lines else ''}"
        with suppress(RuntimeError):  # the store has gone, and its readers with it
            self._notes.write()
        return explained

    def close(self) -> None:
        """Stop writing notes."""
        self._notes.close()

    def _name_missing(self, why: str) -> DistributedError:
        try:
            notes, silent = self._collect()
        except RuntimeError:
            return DistributedError(
                "this rank has lost its job: the job's store does not answer",
                why=why,
                remedy="see why rank 0, which holds the store, or its launcher has ended",
            )
        others = {rank: note for rank, note in notes.items() if rank != self._rank}
        failed = _select(others, lambda note: bool(note.failed))
        if failed:
            return self._others_failed(failed, notes, why)
        furthest = max(note.place for note in notes.values())
        for missing, what in (
            (_select(others, lambda note: note.done), "left the job, which others have not"),
            (silent, "does not answer: its process has ended, or is stopped"),
            (_select(notes, lambda note: note.place < furthest), "did not join a collective that others wait in"),
        ):
            if missing:
                return DistributedError(
                    f"{ranks(missing)} of this job {what}",
                    why=f"{_places([*missing[:_NAMED], self._rank], notes)}; {why}",
                    remedy="see what delays it or has ended it; if it only needs more time, raise "
                    "accel.distributed(timeout=...)",
                )
        return DistributedError(
            "a collective failed, and no rank of this job is missing",
            why=f"{_places([*notes][:_NAMED], notes)}; {why}",
            remedy="check whether all ranks call the same collectives: accelcore run --check-collectives",
        )

    def _others_failed(self, failed: Sequence[int], notes: Mapping[int, Note], why: str = "") -> DistributedError:
        return DistributedError(
            f"{ranks(failed)} of this job failed, and the others cannot go on without it",
            why="; ".join(filter(None, [_places([*failed[:_NAMED], self._rank], notes), why])),
            remedy="see the traceback of that rank",
        )

    def _collect(self) -> tuple[dict[int, Note], list[int]]:
        """Return all notes, and the ranks that have stopped writing; returns at once if a rank has failed."""
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
    """Return whether a collective failed because it lost a rank."""
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and bool(_LOST.search(str(error))))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then the errors from which or during which it was raised, the latest first."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        yield cause
        cause = cause.__cause__ if cause.__suppress_context__ else cause.__context__


def _select(notes: Mapping[int, Note], condition: Callable[[Note], bool]) -> list[int]:
    return [rank for rank, note in notes.items() if condition(note)]


def _places(of: Sequence[int], notes: Mapping[int, Note]) -> str:
    places = {rank: str(notes[rank]) if rank in notes else "has written no note" for rank in of}
    return "; ".join(f"rank {rank} {place}" for rank, place in places.items())

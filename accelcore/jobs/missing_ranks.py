"""Name the rank that is missing if a collective fails, and its place in the script.

A thread of each rank writes a note to the job's store once a second: the step and the last collective. The training
loop itself does nothing for it. A rank that fails adds the line of its script. No thread reads the frames of another
that runs: this has crashed jobs, by bad memory (Python 3.11, torch 2.13).
"""

from __future__ import annotations

import ctypes
import json
import linecache
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from inspect import currentframe
from itertools import count
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError

from accelcore.errors import DistributedError, logger
from accelcore.jobs.collectives import Collectives
from accelcore.torch_internals import flight_records, job_store
from accelcore.util.text import first_line, ranks

_BEAT = 1.0  # seconds between two notes of a rank
_SILENT = 3.0  # seconds without a note after which a rank counts as ended
_SHORT = 64  # largest flight record that is read each second. NCCL's has 2000 entries, and reading it takes 0.15 s.
LOST = re.compile(
    r"\.cc:\d+\] .*(timed out|closed|reset|refused|broken pipe)|timeout caused pair closure|monitoredBarrier",
    re.IGNORECASE,
)
"""Messages of collectives that lost a rank, for which torch has no class of error."""
_ALONE = "look for a call that only some ranks make, such as under `if job.is_main:`"
_ALIKE = f"let all ranks take as many steps: read data through trainer.batches(loader); {_ALONE}"
_FAILED = "failed"  # key under which a rank that failed writes its number
_BETWEEN = "\n       "  # of the ranks in a message, one a line, below each other
_NAMED = 4  # number of ranks whose places a message tells
_WIDTH = 80  # characters of a script's line that a message shows
_LIBRARIES = {"accelcore", "torch", *sys.stdlib_module_names}
_jobs = count()


class MissingRanks:
    """Writes this rank's notes, and finds the missing ranks by all ranks'. Must be created in the thread that trains.

    Attributes:
        timeout: how long ranks wait for each other at the job's end.
    """

    def __init__(self, collectives: Collectives, timeout: timedelta) -> None:
        self._rank, self._world_size, self.timeout = collectives.rank, collectives.world_size, timeout
        self._waits, self._collectives = collectives.waits_for_lost_ranks, collectives
        collectives.steps.clear()
        collectives.calls = (0, "")
        # Keys of several jobs of a process differ by the prefix.
        self._store = job_store(f"rank notes {next(_jobs)}")
        self._explained, self._done, self._failed, self._follows = False, False, "", False
        self._line = ""  # where an error ended the script
        self._beats, self._training_thread = 0, threading.get_ident()
        self._reads_record = os.environ.get("TORCH_FR_BUFFER_SIZE", "") in map(str, range(1, _SHORT + 1))
        self._write()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write_each_second, name="accelcore: rank notes", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Wait until all ranks are done; raise if one has failed, is late, or has gone further than this rank."""
        store, keys = self._store, {rank: f"done {rank}" for rank in range(self._world_size)}
        self._done = True
        self._write()
        store.set(keys[self._rank], "")
        begin, pause = time.monotonic(), 0.005
        look, interval = begin + _BEAT, _BEAT
        while not store.check(list(keys.values())):  # not `wait`, which writes two lines to stderr if it ends in vain
            time.sleep(pause)
            pause = min(2 * pause, _BEAT / 4)
            if time.monotonic() < look:
                continue
            notes = self._read()
            if _select(notes, lambda note: bool(note.failed)):
                self._follows = True
                raise self._name_missing("")
            own = notes[self._rank]
            # One that is done may have seen that all are, and be in the barrier that follows.
            ahead = [rank for rank, note in notes.items() if note.progress > own.progress and not note.done]
            if ahead:
                raise DistributedError(
                    f"rank {self._rank} has ended its part of the job, and {ranks(ahead)} did not",
                    why=_places([self._rank, *ahead], notes),
                    remedy=_ALIKE,
                )
            late = [rank for rank, key in keys.items() if not store.check([key])]
            if late and time.monotonic() - begin > self.timeout.total_seconds():
                self._follows = True
                raise DistributedError(
                    f"{ranks(late)} of this job did not come to its end",
                    why=_places(late, notes),
                    remedy=f"let all ranks end together, or wait longer, by accel.distributed(timeout=...); {_ALONE}",
                )
            interval = min(2 * interval, 60.0)
            look = time.monotonic() + interval

    def ahead(self) -> str:
        """Return the places of the ranks that will not come to this rank's call, and of this rank; "" if all may come.

        Raises:
            DistributedError: a rank has failed.
        """
        self._write()
        notes = self._read()
        if _select(notes, lambda note: note.is_culprit):
            self._follows = True
            # As if a collective had lost the rank: how this error is shown depends on its cause.
            raise self._name_missing("") from DistError()
        own = notes[self._rank]
        gone = _select(notes, lambda note: note.done or note.progress > own.progress or note.at_another_call(own))
        if not gone:
            return ""
        notes[self._rank] = replace(own, line=_script_line(walk_stack(currentframe())))
        return _places([*gone[:_NAMED], self._rank], notes)

    def explain(self, error: BaseException) -> DistributedError | None:
        """If a lost rank caused `error`, return an error that names it, and tell the other ranks, once."""
        if self._explained:
            return None
        self._explained, explained = True, None
        self._line = _script_line(reversed(list(walk_tb(error.__traceback__))))
        # SystemExit is for the launcher, and KeyboardInterrupt for the user; a script may wrap any other error.
        lost = next(filter(self._is_loss, _causes(error)), None) if isinstance(error, Exception) else None
        if lost is not None:
            said = first_line(lost).partition(" This is typically caused by a remote worker")[0]  # a guess of gloo
            said = re.sub(r"^\[\S+\.cc:\d+\] ", "", said)  # a line of gloo's source
            explained = self._name_missing(said, getattr(lost, "remedy", ""))
        self._failed = f"{type(explained or error).__name__}: {first_line(explained or error)}"
        self._follows = self._follows or lost is not None
        with suppress(RuntimeError):  # the store has gone, and its readers with it
            self._write()
            if not self._follows:
                self._store.set(_FAILED, str(self._rank))
        return explained

    def _is_loss(self, error: BaseException) -> bool:
        """Return whether a collective raised an error because a rank was lost."""
        if not isinstance(error, RuntimeError):
            return False
        if isinstance(error, DistError) or LOST.search(str(error)):
            return True
        # Libraries have words of their own, which mean this if another rank has failed before.
        modules = (frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__))
        with suppress(RuntimeError):  # the store has gone
            return dist.distributed_c10d.__name__ in modules and self._store.check([_FAILED])
        return False

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)

    def _write(self) -> None:
        """Write a note now; raises RuntimeError if the store does not answer."""
        self._beats += 1
        number, collective = 0, ""
        with suppress(Exception):  # a note without its collective still shows that the rank lives
            number, collective = _last_collective() if self._reads_record else (0, "")
        steps = list(self._collectives.steps.values())  # a copy, because the training thread may add one
        calls, ends = self._collectives.calls, (self._done, self._failed, self._follows)
        note = _Note(self._beats, steps, calls, number, collective, self._line, *ends)
        self._store.set(f"rank {self._rank}", json.dumps(asdict(note)))

    def _read(self) -> dict[int, _Note]:
        """Return the last note of each rank that has written one; raises RuntimeError if the store does not answer."""
        keys = {rank: f"rank {rank}" for rank in range(self._world_size)}
        store = self._store
        return {rank: _Note(**json.loads(store.get(key))) for rank, key in keys.items() if store.check([key])}

    def _write_each_second(self) -> None:
        """Write notes. If a failed rank has raised no error here after a second, rank 0 also logs it."""
        beats = 0  # since a rank has failed
        while not self._stop.wait(_BEAT):
            try:
                self._write()
                beats += beats > 0 or self._store.check([_FAILED])
                if self._explained:
                    continue
                if beats == 1 and self._waits and not self._done:
                    self._stop_waiting()
                elif beats == 2 and self._rank == 0:
                    failed = int(self._store.get(_FAILED))
                    logger.error("a rank of this job failed: %s", _places([failed], self._read()))
            except RuntimeError:
                return  # the store has gone, and the job with it

    def _stop_waiting(self) -> None:
        """Let the training thread raise, and abort what it may wait for.

        torch raises nothing here. A collective of NCCL returns before it is done. An abort ends it without an error and
        leaves wrong values; only the next collective would raise, and a script may save before. Waiting for each
        collective on the host (`TORCH_NCCL_BLOCKING_WAIT`) would raise, and slow down every step. So the error is set
        first: Python raises it when the thread returns from the call that waits.
        """
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._training_thread), ctypes.py_object(DistError))
        if (group := dist.group.WORLD) is not None:
            group.abort()

    def _name_missing(self, why: str, remedy: str = "") -> DistributedError:
        try:
            notes, silent = self._collect()
        except RuntimeError:
            return DistributedError(
                "this rank has lost its job: the job's store does not answer",
                why=why,
                remedy="see why rank 0, which holds the store, or its launcher has ended",
            )
        others = {rank: note for rank, note in notes.items() if rank != self._rank}
        if culprits := _select(others, lambda note: note.is_culprit):
            return self._others_failed(culprits, notes)
        furthest = max(note.place for note in notes.values())
        late = f"see what delays it or has ended it; {_ALONE}; if it only needs more time, raise "
        late += "accel.distributed(timeout=...)"
        for missing, what, otherwise in (
            (_select(others, lambda note: note.done), "left the job, which others have not", _ALIKE),
            (silent, "does not answer: its process has ended, or is stopped", late),
            (_select(notes, lambda note: note.place < furthest), "did not join a collective that others wait in", late),
        ):
            if missing:
                return DistributedError(
                    f"{ranks(missing)} of this job {what}",
                    why=_BETWEEN.join(filter(None, [why, _places([*missing[:_NAMED], self._rank], notes)])),
                    remedy=remedy or otherwise,
                )
        if failed := _select(others, lambda note: bool(note.failed)):
            return self._others_failed(failed, notes, why, remedy)
        places = _places([*notes][:_NAMED], notes)
        if remedy:  # an error of accelcore's own, which names the call
            return DistributedError(why, why=places, remedy=remedy)
        return DistributedError(
            "a collective failed, and no rank of this job is missing",
            why=f"{why}{_BETWEEN}{places}",
            remedy="call the same collectives on all ranks; under TORCH_DISTRIBUTED_DEBUG=DETAIL, torch compares them",
        )

    def _others_failed(
        self, failed: Sequence[int], notes: Mapping[int, _Note], why: str = "", remedy: str = ""
    ) -> DistributedError:
        ended = notes[failed[0]].failed.startswith("SystemExit")
        what = "ended by sys.exit()" if ended else "failed"
        return DistributedError(
            f"{ranks(failed)} of this job {what}, and the others cannot go on without it",
            why=_BETWEEN.join(filter(None, [why, _places([*failed[:_NAMED], self._rank], notes)])),
            remedy=remedy or ("let all ranks end together" if ended else "see the traceback of that rank"),
        )

    def _collect(self) -> tuple[dict[int, _Note], list[int]]:
        """Return all notes, and the ranks that have stopped writing; returns at once if a rank has failed."""
        self._write()
        first, deadline = self._read(), time.monotonic() + _SILENT
        while True:
            time.sleep(_BEAT / 4)
            notes = self._read()
            others = [rank for rank in range(self._world_size) if rank != self._rank]
            ended = [rank for rank in others if rank in notes and (notes[rank].done or notes[rank].failed)]
            silent = [rank for rank in others if rank not in ended and notes.get(rank) == first.get(rank)]
            culprit = any(notes[rank].is_culprit for rank in ended)
            if culprit or not silent or time.monotonic() > deadline:
                return notes, silent


@dataclass(frozen=True)
class _Note:
    """Place of a rank in the script."""

    beat: int  # the number of this note
    steps: Sequence[Sequence[int]] = ()  # step and micro-batch of each trainer
    calls: Sequence[Any] = (0, "")  # number and last name of the calls that it has begun and all ranks must make
    number: int = 0  # the number of the last collective
    collective: str = ""  # its name
    line: str = ""
    done: bool = False
    failed: str = ""
    follows: bool = False  # whether the rank failed because it lost another one

    @property
    def is_culprit(self) -> bool:
        return bool(self.failed) and not self.follows and not self.done

    @property
    def progress(self) -> tuple[int, int, int]:
        """Steps, micro-batches and calls that the rank has begun, to compare with other ranks."""
        return sum(step for step, _ in self.steps), sum(micro for _, micro in self.steps), self.calls[0]

    def at_another_call(self, other: _Note) -> bool:
        """Return whether the rank's last call has the number of the other's, and another name."""
        return self.progress == other.progress and self.calls[1] != other.calls[1]

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Progress of the rank, and its last collective."""
        return *self.progress, self.number

    def __str__(self) -> str:
        steps = " and ".join(
            f"step {step}" + (f", micro-batch {micro}" if micro > 1 else "") for step, micro in self.steps
        )
        parts = [
            f"has begun {steps}" if steps else "has begun no step",
            f"its last collective is {self.collective}" if self.collective else "",
            f"it is at {self.line}" if self.line and not self.failed else "",
            "it is done with the job" if self.done else "",
        ]
        place = ", ".join(filter(None, parts))
        at = f" at {self.line}" if self.line else ""
        return f"failed{at}: {self.failed}; it {place}" if self.failed else place


def _last_collective() -> tuple[int, str]:
    """Return number and name of the last collective in torch's flight record; some libraries write none."""
    entries = flight_records()
    if not entries:
        return 0, ""
    last = max(entries, key=lambda entry: entry["record_id"])
    sizes = ", ".join(str(tuple(size)) for size in last["input_sizes"])
    of_what = f" of {sizes}" if sizes else ""
    return last["record_id"] + 1, f"{last['profiling_name']}{of_what} (collective {last['record_id'] + 1})"


def _script_line(frames: Iterable[tuple[FrameType, int | None]]) -> str:
    """Return the first line outside of libraries, such as `train.py:12 in main (trainer.save(folder))`.

    `frames` are of the calling thread, and begin with the innermost.
    """
    for frame, line in frames:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            path, source = frame.f_code.co_filename, ""
            line = line or frame.f_code.co_firstlineno  # Python gives no line to an instruction of its own
            with suppress(Exception):  # what a script has put into the cache of lines
                source = linecache.getline(path, line).strip()[:_WIDTH]
            return f"{Path(path).name}:{line} in {frame.f_code.co_name}" + (f" ({source})" if source else "")
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then the errors from which or during which it was raised, the latest first."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        yield cause
        cause = cause.__cause__ if cause.__suppress_context__ else cause.__context__


def _select(notes: Mapping[int, _Note], condition: Callable[[_Note], bool]) -> list[int]:
    return [rank for rank, note in notes.items() if condition(note)]


def _places(of: Sequence[int], notes: Mapping[int, _Note]) -> str:
    places = {rank: str(notes[rank]) if rank in notes else "has written no note" for rank in of}
    return _BETWEEN.join(f"rank {rank} {place}" for rank, place in places.items())

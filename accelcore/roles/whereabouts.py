"""Where the ranks of a job are: what a message has to say when one of them is missing.

Once a second each rank leaves a note in the job's store: the step that it is in, its last collective, by torch's flight
recorder, and the line of the script. A thread of its own does so, and a training loop pays nothing. When a collective
fails, the notes tell who did not come, and where they are.
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch's types leave it out

from accelcore.errors import AccelError, DistributedError

__all__ = ["Whereabouts", "ranks"]

_BEAT = 1.0
"""Seconds between two notes of a rank."""

_SILENT = 3.0
"""Seconds without a note after which a rank is taken for ended."""

_LOST = re.compile(r"tim(ed|e) ?out|connection|peer|monitoredBarrier", re.IGNORECASE)
"""What the error of a collective says where ranks have lost each other."""

_NAMED = 4
"""Of how many ranks a message says where they are."""

_formed = count()
_LIBRARIES = tuple(
    str(Path(folder).resolve())
    for folder in (Path(torch.__file__).parent, Path(__file__).parents[1], sysconfig.get_path("stdlib"))
)


def ranks(numbers: Iterable[int]) -> str:
    """Ranks as a text says them: `rank 1`, `ranks 0, 2 and 3`."""
    *rest, last = map(str, sorted(numbers))
    return f"ranks {', '.join(rest)} and {last}" if rest else f"rank {last}"


class Whereabouts:
    """The notes of a job's ranks, and this rank's own. Made in the thread that trains.

    Args:
        store: the job's, of torch.distributed, which all ranks reach.
        rank, world_size: this rank, and of how many.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store: Any = PrefixStore(f"whereabouts {next(_formed)}", store)
        self._rank, self._world_size = rank, world_size
        self._steps: dict[int, int] = {}
        self._beats, self._done, self._failed, self._told = 0, False, "", False
        self._trains = threading.get_ident()
        self._stop = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._write_each_second, name="accelcore: whereabouts", daemon=True)
        self._thread.start()

    def began(self, trainer: int, step: int) -> None:
        """A trainer of this rank, by its number, has begun a step."""
        self._steps[trainer] = step

    def leave(self, timeout: timedelta) -> None:
        """Wait until all ranks are done, so that none loses what another holds for it.

        Raises:
            DistributedError: another rank is in a step that this one never began, or did not come in time.
        """
        self._done = True
        self._write()
        self._store.set(f"done {self._rank}", "")
        done = {rank: f"done {rank}" for rank in range(self._world_size)}
        begin, patience = time.monotonic(), _BEAT
        while True:
            with suppress(RuntimeError):
                self._store.wait(list(done.values()), timedelta(seconds=patience))
                return
            notes = self._read()
            failed = [rank for rank, note in notes.items() if note["failed"]]
            if failed:
                raise self._cannot_go_on(failed, notes)
            ahead = [rank for rank, note in notes.items() if sum(note["steps"]) > sum(self._steps.values())]
            if ahead:
                raise DistributedError(
                    f"rank {self._rank} has ended its loop, and {ranks(ahead)} of its job did not",
                    why=_places([self._rank, *ahead], notes),
                    remedy="let all ranks take as many steps: read data through trainer.batches(loader)",
                )
            late = [rank for rank, key in done.items() if not self._store.check([key])]
            if late and time.monotonic() - begin > timeout.total_seconds():
                raise DistributedError(
                    f"{ranks(late)} of this job did not come to its end",
                    why=_places(late, notes),
                    remedy="let all ranks leave `with accel.distributed():`, or give them longer by its timeout",
                )
            patience = min(2 * patience, 60.0)

    def explain(self, error: BaseException) -> DistributedError | None:
        """Who is missing, where that is why this rank has failed; the others learn of the failure."""
        if self._told:
            return None
        self._told, explained = True, None
        if isinstance(error, RuntimeError) and (
            isinstance(error, DistributedError) or not isinstance(error, AccelError)
        ):
            explained = self._blame(error) if _LOST.search(str(error)) else None
        lines = str(explained or error).splitlines()
        self._failed = f"{type(explained or error).__name__}: {lines[0] if lines else ''}"
        with suppress(RuntimeError):  # the store is gone, and with it whoever would read this
            self._write()
        return explained

    def close(self) -> None:
        """Write no more notes."""
        self._stop.set()
        self._thread.join(5)

    def _blame(self, error: RuntimeError) -> DistributedError:
        why = str(error).strip().split("\n", 1)[0]
        try:
            notes, silent = self._ask()
        except RuntimeError:
            return DistributedError(
                "this rank has lost its job: the store of it is gone",
                why=why,
                remedy="see why rank 0, which holds it, or its launcher has ended",
            )
        others = {rank: note for rank, note in notes.items() if rank != self._rank}
        failed = [rank for rank, note in others.items() if note["failed"]]
        if failed:
            return self._cannot_go_on(failed, notes, why)
        furthest = max(_place(note) for note in notes.values())
        found = [
            ([rank for rank, note in others.items() if note["done"]], "left the job, which others have not"),
            (silent, "does not answer: its process has ended, or is stopped"),
            ([rank for rank, note in notes.items() if _place(note) < furthest], "did not come to what the others do"),
        ]
        for blamed, what in found:
            if blamed:
                return DistributedError(
                    f"{ranks(blamed)} of this job {what}",
                    why=f"{_places([*blamed[:_NAMED], self._rank], notes)}; {why}",
                    remedy="see what holds it up, or has ended it; where it only needs longer, say "
                    "accel.distributed(timeout=...)",
                )
        return DistributedError(
            "a collective failed, and all ranks of this job are there",
            why=f"{_places([*others][:_NAMED], notes)}; {why}",
            remedy="see whether all ranks call the same collectives: set TORCH_DISTRIBUTED_DEBUG=DETAIL",
        )

    def _cannot_go_on(self, failed: list[int], notes: dict[int, dict[str, Any]], why: str = "") -> DistributedError:
        return DistributedError(
            f"{ranks(failed)} of this job failed, and the others cannot go on without it",
            why="; ".join(filter(None, [_places([*failed[:_NAMED], self._rank], notes), why])),
            remedy="see the traceback of that rank",
        )

    def _ask(self) -> tuple[dict[int, dict[str, Any]], list[int]]:
        """All notes, and the ranks that write none any more; at once where one has failed."""
        self._write()
        first, deadline = self._read(), time.monotonic() + _SILENT
        while True:
            self._stop.wait(_BEAT / 4)
            notes = self._read()
            silent = [
                rank
                for rank in range(self._world_size)
                if rank != self._rank
                and (rank not in notes or not (notes[rank]["done"] or notes[rank]["failed"]))
                and notes.get(rank) == first.get(rank)
            ]
            failed = any(note["failed"] for rank, note in notes.items() if rank != self._rank)
            if failed or not silent or time.monotonic() > deadline:
                return notes, silent

    def _read(self) -> dict[int, dict[str, Any]]:
        keys = {rank: f"rank {rank}" for rank in range(self._world_size)}
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def _write(self) -> None:
        self._beats += 1
        number, collective = _last_collective()
        note = {
            "beat": self._beats,
            "steps": list(self._steps.values()),
            "number": number,
            "collective": collective,
            "line": _line(self._trains),
            "done": self._done,
            "failed": self._failed,
        }
        self._store.set(f"rank {self._rank}", json.dumps(note))

    def _write_each_second(self) -> None:
        while not self._stop.wait(_BEAT):
            try:
                self._write()
            except RuntimeError:
                return  # the store is gone, and with it the job


def _place(note: Mapping[str, Any]) -> tuple[int, int]:
    """How far a rank is, to be compared with another."""
    return sum(note["steps"]), note["number"]


def _places(of: Sequence[int], notes: Mapping[int, Mapping[str, Any]]) -> str:
    return "; ".join(f"rank {rank} {_text(notes[rank]) if rank in notes else 'has left no word'}" for rank in of)


def _text(note: Mapping[str, Any]) -> str:
    steps = " and ".join(f"step {step}" for step in note["steps"])
    parts = [
        f"is in {steps}" if steps else "has begun no step",
        f"its last collective is {note['collective']}" if note["collective"] else "",
        f"it is at {note['line']}" if note["line"] else "",
        "it is done with the job" if note["done"] else "",
        f"it failed: {note['failed']}" if note["failed"] else "",
    ]
    return ", ".join(part for part in parts if part)


def _last_collective() -> tuple[int, str]:
    """The number and the name of the last that torch's flight recorder knows; of some libraries it knows none."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    entries = json.loads(dump()).get("entries", []) if dump is not None else []
    if not entries:
        return 0, ""
    last = max(entries, key=lambda entry: entry["record_id"])
    sizes = ", ".join(str(tuple(size)) for size in last["input_sizes"])
    return last["record_id"] + 1, f"{last['profiling_name']} of {sizes or 'nothing'}, number {last['record_id'] + 1}"


def _line(thread: int) -> str:
    """The line of the script at which a thread is, behind what torch, Python and this package do for it."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<frozen")):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"

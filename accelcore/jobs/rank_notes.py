"""Notes about where each rank of a job is, for error messages that name a missing rank.

A thread of each rank writes a note to the job's store once a second: the step, the last collective, the line of the
script. The training loop itself does nothing for it.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # missing in torch's types

from accelcore.torch_internals import flight_records

__all__ = ["BEAT", "Note", "RankNotes", "line_of"]

BEAT = 1.0
"""Seconds between two notes of a rank."""

_SHORT = 64
"""Largest flight record that is read each second. NCCL's has 2000 entries, and reading it takes 0.15 s."""

_jobs = count()
_OURS = tuple(str(Path(folder).resolve()) for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_PYTHON = sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class Note:
    """Place of a rank in the script.

    Attributes:
        beat: number of this note.
        steps: the step of each of the rank's trainers.
        number: number of collectives that the rank has begun.
        collective: the last of them; "" if nothing records them.
        line: line of the script.
        done: whether the rank waits to leave the job.
        failed: the error that ended the rank, or "".
    """

    beat: int
    steps: Sequence[int] = ()
    number: int = 0
    collective: str = ""
    line: str = ""
    done: bool = False
    failed: str = ""

    @property
    def place(self) -> tuple[int, int]:
        """Progress of the rank, to compare with other ranks."""
        return sum(self.steps), self.number

    def __str__(self) -> str:
        steps = " and ".join(f"step {step}" for step in self.steps)
        parts = [
            f"is in {steps}" if steps else "has begun no step",
            f"its last collective is {self.collective}" if self.collective else "",
            f"it is at {self.line}" if self.line else "",
            "it is done with the job" if self.done else "",
            f"it failed: {self.failed}" if self.failed else "",
        ]
        return ", ".join(part for part in parts if part)


class RankNotes:
    """Writer of this rank's notes, and reader of all ranks'. Must be created in the thread that trains.

    Args:
        store: torch.distributed's store of the job.
        rank, world_size: this rank, and the number of ranks.
        steps: the step of each trainer of this rank; the trainers write to it.

    Attributes:
        done, failed: as in this rank's next note.
        line: line at which an error ended the script; "" until then, and each note has the current line.
        store: the job's store with a prefix, so that keys of several jobs of a process differ.
    """

    def __init__(self, store: Any, rank: int, world_size: int, steps: Mapping[int, int]) -> None:
        self.store: Any = PrefixStore(f"rank notes {next(_jobs)}", store)
        self.done, self.failed, self.line = False, "", ""
        self._rank, self._world_size, self._steps, self._beats = rank, world_size, steps, 0
        self._training_thread, self._reads_record = threading.get_ident(), _record_is_short()
        self._stop = threading.Event()
        self.write()
        self._thread = threading.Thread(target=self._write_each_second, name="accelcore: rank notes", daemon=True)
        self._thread.start()

    def write(self) -> None:
        """Write a note now.

        Raises:
            RuntimeError: the store does not answer.
        """
        self._beats += 1
        number, collective = _last_collective() if self._reads_record else (0, "")
        line = self.line or _current_line(self._training_thread)
        steps = list(self._steps.values())
        note = Note(self._beats, steps, number, collective, line, self.done, self.failed)
        self.store.set(f"rank {self._rank}", json.dumps(asdict(note)))

    def read(self) -> dict[int, Note]:
        """Return the last note of each rank that has written one.

        Raises:
            RuntimeError: the store does not answer.
        """
        keys = {rank: f"rank {rank}" for rank in range(self._world_size)}
        return {rank: Note(**json.loads(self.store.get(key))) for rank, key in keys.items() if self.store.check([key])}

    def close(self) -> None:
        """Stop writing."""
        self._stop.set()
        self._thread.join(5)

    def _write_each_second(self) -> None:
        while not self._stop.wait(BEAT):
            try:
                self.write()
            except RuntimeError:
                return  # the store has gone, and the job with it


def line_of(error: BaseException) -> str:
    """Return the line of the script at which an error was raised, such as `train.py:12 in main`."""
    frames = [
        (frame, line) for frame, line in walk_tb(error.__traceback__) if not _is_library(frame.f_code.co_filename)
    ]
    return _as_text(*frames[-1]) if frames else ""


def _record_is_short() -> bool:
    length = os.environ.get("TORCH_FR_BUFFER_SIZE", "")
    return length.isdecimal() and 0 < int(length) <= _SHORT


def _last_collective() -> tuple[int, str]:
    """Return number and name of the last collective in torch's flight record; some libraries write none."""
    entries = flight_records()
    if not entries:
        return 0, ""
    last = max(entries, key=lambda entry: entry["record_id"])
    sizes = ", ".join(str(tuple(size)) for size in last["input_sizes"])
    of_what = f" of {sizes}" if sizes else ""
    return last["record_id"] + 1, f"{last['profiling_name']}{of_what}, number {last['record_id'] + 1}"


def _current_line(thread: int) -> str:
    """Return the line of the script that a thread executes, or from which it called a library."""
    frame = sys._current_frames().get(thread)
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else _as_text(frame, frame.f_lineno)


def _as_text(frame: FrameType, line: int) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{line} in {frame.f_code.co_name}"


def _is_library(file: str) -> bool:
    return file.startswith((*_OURS, "<frozen")) or (file.startswith(_PYTHON) and "site-packages" not in file)

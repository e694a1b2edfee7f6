"""The notes that the ranks of a job leave of where they are: for messages that have to name one.

Once a second each rank leaves a note in the job's store: the step that it is in, its last collective, by torch's flight
recorder, and the line of the script. A thread of its own does so, and a training loop pays nothing.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # its types leave it out

__all__ = ["BEAT", "Note", "Notes", "ranks"]

BEAT = 1.0
"""Seconds between two notes of a rank."""

_SHORT = 64
"""How many collectives a recorder may keep that is read each second; NCCL's keeps 2000, which takes 0.15 s."""

_formed = count()
_OURS = tuple(str(Path(folder).resolve()) for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_PYTHON = sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class Note:
    """Where a rank is.

    Attributes:
        beat: which of the rank's notes this is.
        steps: the step of each of its trainers.
        number: how many collectives it has begun.
        collective: the last of them; "" where nothing records them.
        line: of the script.
        done: whether it waits to leave the job.
        failed: the error that has ended it, or "".
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
        """How far the rank is, to be compared with another's."""
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


class Notes:
    """The notes of a job's ranks. Made in the thread that trains.

    Args:
        store: the job's, of torch.distributed, which all ranks reach.
        rank, world_size: this rank, and of how many.
        steps: the step of each trainer of this rank, by its number; the trainers write to it.

    Attributes:
        done, failed: what this rank's next note says.
        line: where an error ended what the rank did; "" while it goes on, and is looked for.
        store: a part of the job's store.
    """

    def __init__(self, store: Any, rank: int, world_size: int, steps: Mapping[int, int]) -> None:
        self.store: Any = PrefixStore(f"whereabouts {next(_formed)}", store)
        self.steps = steps
        self.done, self.failed, self.line = False, "", ""
        self._rank, self._world_size, self._beats = rank, world_size, 0
        self._trains, self._reads_recorder = threading.get_ident(), _recorder_is_short()
        self._stop = threading.Event()
        self.write()
        self._thread = threading.Thread(target=self._write_each_second, name="accelcore: notes", daemon=True)
        self._thread.start()

    def write(self) -> None:
        """Leave a note now.

        Raises:
            RuntimeError: the store is gone.
        """
        self._beats += 1
        number, collective = _last_collective() if self._reads_recorder else (0, "")
        steps = list(self.steps.values())
        line = self.line or _line(self._trains)
        note = Note(self._beats, steps, number, collective, line, self.done, self.failed)
        self.store.set(f"rank {self._rank}", json.dumps(asdict(note)))

    def read(self) -> dict[int, Note]:
        """The last note of each rank that has left one.

        Raises:
            RuntimeError: the store is gone.
        """
        keys = {rank: f"rank {rank}" for rank in range(self._world_size)}
        return {rank: Note(**json.loads(self.store.get(key))) for rank, key in keys.items() if self.store.check([key])}

    def close(self) -> None:
        """Write no more."""
        self._stop.set()
        self._thread.join(5)

    def _write_each_second(self) -> None:
        while not self._stop.wait(BEAT):
            try:
                self.write()
            except RuntimeError:
                return  # the store is gone, and with it the job


def ranks(numbers: Iterable[int]) -> str:
    """Ranks as a text says them: `rank 1`, `ranks 0, 2 and 3`."""
    *rest, last = map(str, sorted(numbers))
    return f"ranks {', '.join(rest)} and {last}" if rest else f"rank {last}"


def _recorder_is_short() -> bool:
    length = os.environ.get("TORCH_FR_BUFFER_SIZE", "")
    return length.isdecimal() and 0 < int(length) <= _SHORT


def _last_collective() -> tuple[int, str]:
    """The number and the name of the last that torch's flight recorder knows; of some libraries it knows none."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    entries = json.loads(dump()).get("entries", []) if dump is not None else []
    if not entries:
        return 0, ""
    last = max(entries, key=lambda entry: entry["record_id"])
    sizes = ", ".join(str(tuple(size)) for size in last["input_sizes"])
    of_what = f" of {sizes}" if sizes else ""
    return last["record_id"] + 1, f"{last['profiling_name']}{of_what}, number {last['record_id'] + 1}"


def line_of(error: BaseException) -> str:
    """The line of the script at which an error was raised, as far as it got."""
    frames = [
        (frame, line) for frame, line in walk_tb(error.__traceback__) if not _is_library(frame.f_code.co_filename)
    ]
    return _in_words(*frames[-1]) if frames else ""


def _line(thread: int) -> str:
    """The line of the script at which a thread is, behind what torch, Python and this package do for it."""
    frame = sys._current_frames().get(thread)
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else _in_words(frame, frame.f_lineno)


def _in_words(frame: FrameType, line: int) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{line} in {frame.f_code.co_name}"


def _is_library(file: str) -> bool:
    return file.startswith((*_OURS, "<frozen")) or (file.startswith(_PYTHON) and "site-packages" not in file)

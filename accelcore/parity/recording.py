"""Files of a recording: JSON and safetensors, no pickle.

    ref/rank-00000/
      recording.json               settings, options and notes
      generators.safetensors       the states of the host's random generators before the first step
      weights-0.safetensors        the state of the first model before the first step
      batches-00000001.safetensors whole batches of a step: MODEL.CALL.NUMBER, and the host generator's state before it
      steps-00000001.safetensors   samples of some steps, one tensor for each step, dtype and device; their events

Every file is written beside its place and renamed, so that a run that is killed leaves whole files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from accelcore.errors import RecordingError
from accelcore.parity.events import Event, Row, SeenStep
from accelcore.util.containers import bytes_of
from accelcore.util.files import remedy_of_writing, replace_file, replacing

_FORMAT = 1
_FILE = "recording.json"
_RANK = re.compile(r"rank-\d{5}", re.ASCII)
_STEPS_A_FILE, _BYTES_A_FILE = 64, 1 << 23
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, SafetensorError)


def ranks_of(folder: Path) -> dict[int, Path]:
    """Return the folders of a recording's ranks; raise RecordingError if the folder has no recording."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    found = {int(path.name[5:]): path for path in paths if _RANK.fullmatch(path.name) and (path / _FILE).is_file()}
    if not found:
        raise RecordingError(
            f"there is no recording in {folder}",
            why="a recording has a folder rank-00000 with a file recording.json",
            remedy="make one: accelcore record --out FOLDER script.py, or with accelcore.Record(FOLDER)",
        )
    return found


def check_place(folder: Path) -> None:
    """Raise RecordingError if a folder holds something else than a recording, or cannot be made or written."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    with _writing(folder):
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise PermissionError(f"{there} is {'read-only' if there.is_dir() else 'not a folder'}")
    if there == folder and any(not _RANK.fullmatch(path.name) for path in folder.iterdir()):
        raise RecordingError(f"{folder} has files that are not a recording", remedy="give a folder that does not exist")


class Writer:
    """Writes the recording of one rank. An older recording in its place is removed."""

    def __init__(self, folder: Path, rank: int, facts: Mapping[str, Any]) -> None:
        self._folder = folder / f"rank-{rank:05d}"
        self._facts = {"what": "accelcore recording", "format": _FORMAT, "rank": rank, "steps": 0, **facts}
        self._facts["run"] = uuid4().hex
        self._waiting: list[SeenStep] = []
        with _writing(self._folder):
            if self._folder.exists():
                shutil.rmtree(self._folder)
            self._folder.mkdir(parents=True)
            self._write_facts()

    def keep(self, name: str, tensors: dict[str, Tensor], **texts: str) -> None:
        """Write whole tensors; `Reader.kept` returns them by the same name."""
        values: dict[str, Tensor | str] = {**tensors, **texts}
        sums = {each: _sum(self._facts["run"], name, each, value) for each, value in values.items()}
        with _writing(self._folder), replacing(self._folder / f"{name}.safetensors") as new:
            save_file(tensors, new, {**texts, "sums": json.dumps(sums)})

    def add(self, step: SeenStep) -> None:
        """Add a step. It is written together with others."""
        self._waiting.append(step)
        size = sum(values.nbytes for each in self._waiting for values in each.values.values())
        if size > _BYTES_A_FILE or len(self._waiting) == _STEPS_A_FILE:
            self.write()

    def write(self, **facts: Any) -> None:
        """Write the steps that wait, and changed facts."""
        with _writing(self._folder):
            if json.loads((self._folder / _FILE).read_text(encoding="utf-8"))["run"] != self._facts["run"]:
                raise RecordingError(
                    f"another run records into {self._folder}",
                    why="it began later, and has replaced what this run had written",
                    remedy="give each run a folder of its own",
                )
        if self._waiting:
            tables: list[Sequence[Row]] = []  # most steps have the same one
            for each in self._waiting:
                if each.rows not in tables:
                    tables.append(each.rows)
            steps = {each.number: tables.index(each.rows) for each in self._waiting}
            rows = [[[*row.event, *row[1:]] for row in table] for table in tables]
            samples = {f"{each.number}.{key}": values for each in self._waiting for key, values in each.values.items()}
            events = json.dumps({"tables": rows, "steps": steps})
            self.keep(f"steps-{self._waiting[0].number:08d}", samples, events=events)
            self._facts["steps"], self._waiting = self._waiting[-1].number, []
        self._facts |= facts
        with _writing(self._folder):
            self._write_facts()

    def _write_facts(self) -> None:
        facts = json.dumps(self._facts)
        replace_file(self._folder / _FILE, json.dumps({**self._facts, "sum": crc32(facts.encode())}).encode())


class Reader:
    """Reads the recording of one rank; raises RecordingError if it is damaged or of another format."""

    facts: dict[str, Any]  # what was recorded beside the steps: settings, options, notes
    steps: range  # the numbers of the steps

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps: dict[int, tuple[Path, list[Row]]] = {}
        with _reading(folder):
            self.facts = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            if self.facts["what"] != "accelcore recording":
                raise ValueError("this is another kind of file")
            if self.facts["format"] != _FORMAT:
                raise RecordingError(
                    f"the recording {folder} has format {self.facts['format']!r}, and this accelcore reads {_FORMAT}",
                    remedy="compare with the version of accelcore that wrote it, or record again",
                )
            if self.facts.pop("sum") != crc32(json.dumps(self.facts).encode()):
                raise ValueError(f"{_FILE} has another checksum than when it was written")
            for path in folder.glob("steps-*.safetensors"):
                with safe_open(path, framework="pt") as file:
                    events = json.loads(self._checked(file, path.stem, "events"))
                tables = [
                    [Row(Event(*row[:4]), row[4], tuple(row[5]), *row[6:]) for row in each] for each in events["tables"]
                ]
                self._steps |= {int(number): (path, tables[table]) for number, table in events["steps"].items()}
            self.steps = range(1, self.facts["steps"] + 1)
            if lost := set(self.steps) - self._steps.keys():
                raise ValueError(f"there are no samples of step {min(lost)}")

    def step(self, number: int) -> SeenStep:
        path, rows = self._steps[number]
        with _reading(self._folder), safe_open(path, framework="pt") as file:
            keys = {row.key for row in rows}
            return SeenStep(number, rows, {key: self._checked(file, path.stem, f"{number}.{key}") for key in keys})

    def path(self, name: str) -> Path:
        """Return the file of whole tensors."""
        return self._folder / f"{name}.safetensors"

    def kept(self, name: str) -> dict[str, Tensor]:
        """Return whole tensors that `Writer.keep` has written."""
        with _reading(self._folder), safe_open(self.path(name), framework="pt") as file:
            return {each: self._checked(file, name, each) for each in file.keys()}  # noqa: SIM118  # it is no dict

    def _checked(self, file: Any, file_name: str, name: str) -> Any:
        texts = file.metadata()
        with torch.device("cpu"):  # safetensors would read to the default device
            value = texts[name] if name in texts else file.get_tensor(name)
        if _sum(self.facts["run"], file_name, name, value) != json.loads(texts["sums"])[name]:
            raise ValueError(f"{name} in {file_name} has another checksum than when it was written")
        return value


def _sum(run: str, file: str, name: str, value: Tensor | str) -> int:
    """Return a checksum of a tensor or a text, which shows a changed place, dtype or shape, too."""
    if isinstance(value, str):
        return crc32(f"{run} {file} {name} {value}".encode())
    place = f"{run} {file} {name} {value.dtype} {tuple(value.shape)}"
    return crc32(bytes_of(value).numpy().data, crc32(place.encode()))


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        raise RecordingError(f"the recording {folder} is damaged", why=repr(error), remedy="record again") from error


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RecordingError(
            f"the recording cannot be written to {folder}", why=str(error), remedy=remedy_of_writing(error)
        ) from error

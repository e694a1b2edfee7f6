"""Files of a recording: JSON and safetensors, no pickle.

    ref/rank-00000/
      recording.json               settings, the table of events, the steps and where they are
      weights-0.safetensors        the state of the first model before the first step
      batches-00000001.safetensors whole batches of a step: MODEL.CALL.NUMBER, and the host generator's state before it
      steps-00000001.safetensors   samples of some steps, one tensor for each step, dtype and device

Every file is written beside its place and renamed, so that a kill leaves whole files. `recording.json` is written last,
each time that steps are added: a run that is killed leaves the steps before.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from accelcore.errors import RecordingError
from accelcore.optim.shards import is_sharded
from accelcore.parity.events import PHASE_OF, Event, Row, Step
from accelcore.util.text import is_whole, replace_file

__all__ = ["Reader", "Writer", "check_place", "ranks_of"]

_FORMAT = 1
_FILE = "recording.json"
_RANK = re.compile(r"rank-(\d{5})", re.ASCII)
_CHUNK = re.compile(r"steps-\d{8}\.safetensors", re.ASCII)
_LARGEST = 1 << 28
_STEPS_A_FILE, _BYTES_A_FILE = 64, 1 << 23
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, SafetensorError)


def ranks_of(folder: Path) -> dict[int, Path]:
    """Return the folders of a recording's ranks.

    Raises:
        RecordingError: the folder has no recording.
    """
    found = {}
    if folder.is_dir():
        for path in folder.iterdir():
            if (match := _RANK.fullmatch(path.name)) and (path / _FILE).is_file():
                found[int(match[1])] = path
    if not found:
        raise RecordingError(
            f"there is no recording in {folder}",
            why="a recording has a folder rank-00000 with a file recording.json",
            remedy="make one: accelcore record --out FOLDER script.py, or with accelcore.Record(FOLDER)",
        )
    return dict(sorted(found.items()))


def check_place(folder: Path) -> None:
    """Raise RecordingError if a folder holds something else than a recording."""
    if folder.is_dir() and any(not _RANK.fullmatch(path.name) for path in folder.iterdir()):
        raise RecordingError(
            f"{folder} holds something else than a recording", remedy="give a folder that does not exist"
        )


class Writer:
    """Writes the recording of one rank. An older recording in its place is removed.

    Raises:
        RecordingError: the folder cannot be written.
    """

    def __init__(self, folder: Path, rank: int, facts: Mapping[str, Any]) -> None:
        self._folder = folder / f"rank-{rank:05d}"
        self._facts = {"what": "accelcore recording", "format": _FORMAT, "rank": rank, **facts}
        self._tables: dict[tuple[Row, ...], int] = {}  # most steps have the same one
        self._steps: dict[str, tuple[int, str]] = {}
        self._waiting: dict[str, Tensor] = {}
        self._first = 0  # of the steps that wait
        try:
            if self._folder.exists():
                shutil.rmtree(self._folder)
            self._folder.mkdir(parents=True)
        except OSError as error:
            raise _not_written(self._folder, error) from error

    def weights(self, model: int, state: Mapping[str, Any], limit: float) -> None:
        """Write the state of a model before its first step.

        Nothing is written if it has more than `limit` bytes, or is divided among ranks.
        """
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        whole = not any(map(is_sharded, tensors.values()))
        if whole and sum(tensor.nbytes for tensor in tensors.values()) <= limit:
            copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
            self._save(copies, f"weights-{model}.safetensors")

    def batches(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Write the whole batches of a step."""
        self._save(tensors, f"batches-{step:08d}.safetensors")

    def add(self, step: Step) -> None:
        """Add a step. It is written together with others."""
        if not self._waiting:
            self._first = step.number
        table = self._tables.setdefault(tuple(step.rows), len(self._tables))
        self._steps[str(step.number)] = table, f"steps-{self._first:08d}.safetensors"
        self._waiting |= {f"{step.number}.{key}": values for key, values in step.values.items()}
        size = sum(values.nbytes for values in self._waiting.values())
        if size > _BYTES_A_FILE or step.number - self._first >= _STEPS_A_FILE:
            self.flush()

    def change(self, **facts: Any) -> None:
        """Change facts of the recording; `flush` writes them."""
        self._facts |= facts

    def flush(self) -> None:
        """Write the steps that wait, and the table of all."""
        if self._waiting:
            self._save(self._waiting, f"steps-{self._first:08d}.safetensors")
            self._waiting = {}
        tables = [[[*row.event, *row[1:]] for row in table] for table in self._tables]
        facts = {**self._facts, "tables": tables, "steps": self._steps}
        try:
            replace_file(self._folder / _FILE, json.dumps(facts).encode())
        except OSError as error:
            raise _not_written(self._folder, error) from error

    def _save(self, tensors: dict[str, Tensor], name: str) -> None:
        beside = self._folder / f".{name}"
        try:
            save_file(tensors, beside)
            os.replace(beside, self._folder / name)
        except (OSError, SafetensorError) as error:
            raise _not_written(self._folder, error) from error


class Reader:
    """Reads the recording of one rank.

    Attributes:
        facts: what was recorded beside the steps: settings, counts, operators.
        steps: the numbers of the steps.

    Raises:
        RecordingError: the recording is damaged, or of another format.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            path = folder / _FILE
            if path.stat().st_size > _LARGEST:
                raise ValueError(f"{path.stat().st_size} bytes are too many")
            facts = json.loads(path.read_text(encoding="utf-8"))
            if facts["what"] != "accelcore recording":
                raise ValueError("this is another kind of file")
            if facts["format"] != _FORMAT or type(facts["format"]) is not int:
                raise RecordingError(
                    f"the recording {folder} has format {facts['format']!r}, and this accelcore reads {_FORMAT}",
                    remedy="compare with the version of accelcore that wrote it, or record again",
                )
            self._tables = [[_row(*row) for row in table] for table in facts.pop("tables")]
            self._steps = {
                int(number): (int(table), _chunk(name)) for number, (table, name) in facts.pop("steps").items()
            }
            if any(table not in range(len(self._tables)) for table, _ in self._steps.values()):
                raise ValueError("a step has a table that is missing")
            self._check_samples()
        except _UNREADABLE as error:
            raise _damaged(folder, error) from error
        self.facts: dict[str, Any] = facts
        self.steps = sorted(self._steps)

    def _check_samples(self) -> None:
        """Raise if samples are missing or cut off: a replay that takes hours would end there."""
        needed = defaultdict[str, set[str]](set)
        for number, (table, name) in self._steps.items():
            needed[name] |= {f"{number}.{row.key}" for row in self._tables[table]}
        for name, keys in needed.items():
            with safe_open(self._folder / name, framework="pt") as file:
                if lost := keys - set(file.keys()):
                    raise ValueError(f"{name} lacks {sorted(lost)[0]}")

    def step(self, number: int) -> Step:
        """Return a step."""
        table, name = self._steps[number]
        rows = self._tables[table]
        try:
            with safe_open(self._folder / name, framework="pt") as file:
                values = {key: file.get_tensor(f"{number}.{key}") for key in {row.key for row in rows}}
            for key, joined in values.items():
                if joined.shape != (sum(row.size for row in rows if row.key == key),):
                    raise ValueError(f"{name} has another number of values of {key}")
        except _UNREADABLE as error:
            raise _damaged(self._folder, error) from error
        return Step(number, rows, values)

    def batches(self, step: int) -> dict[str, Tensor]:
        """Return the whole batches of a step, as they were given to `Writer.batches`."""
        try:
            return load_file(self._folder / f"batches-{step:08d}.safetensors")
        except _UNREADABLE as error:
            raise _damaged(self._folder, error) from error

    def weights_file(self, model: int) -> Path | None:
        """Return the file of a model's state before its first step; None if it was too large to be recorded."""
        path = self._folder / f"weights-{model}.safetensors"
        return path if path.is_file() else None

    def weights(self, model: int) -> dict[str, Tensor]:
        """Return a model's state before its first step; empty if it was not recorded."""
        path = self.weights_file(model)
        try:
            return {} if path is None else load_file(path)
        except _UNREADABLE as error:
            raise _damaged(self._folder, error) from error


def _row(kind: str, module: str, item: str, number: int, key: str, shape: list[int], source: str, count: int) -> Row:
    if kind not in PHASE_OF or not all(isinstance(text, str) for text in (module, item, key, source)):
        raise ValueError(f"{kind!r} of {module!r} is no event")
    if not (is_whole(number) and is_whole(count) and all(is_whole(size) for size in shape)):
        raise ValueError(f"the numbers of {kind} of {module!r} are no whole numbers")
    return Row(Event(kind, module, item, number), key, tuple(shape), source, count)


def _chunk(name: str) -> str:
    if not _CHUNK.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a file of samples")
    return name


def _damaged(folder: Path, error: BaseException) -> RecordingError:
    return RecordingError(f"the recording {folder} is damaged", why=repr(error), remedy="record again")


def _not_written(folder: Path, error: BaseException) -> RecordingError:
    return RecordingError(
        f"the recording cannot be written to {folder}",
        why=str(error),
        remedy="free disk space, or check the permissions of the folder",
    )

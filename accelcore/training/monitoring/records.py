"""The file of a log: JSON lines, each with the step that it belongs to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelcore.errors import ConfigurationError
from accelcore.util.text import is_number, is_whole

FILE = "log.jsonl"

Record = Mapping[str, Any]


def read_records(folder: Path) -> list[Record]:
    """Return the lines of a log, by its folder or its file. A last line that a kill has cut off is skipped."""
    path = folder if folder.is_file() and folder.suffix == ".jsonl" else folder / FILE
    try:
        *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        logs = sorted(str(found.parent) for found in folder.glob(f"*/{FILE}"))
        raise ConfigurationError(
            f"there is no log in {folder}",
            why=f"{path}: {error.strerror}",
            available=", ".join(logs[:5]),
            remedy="give the folder that accelcore.Log(folder) was given",
        ) from None
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not is_whole(record["step"]):
                raise TypeError(f"step is {record['step']!r}")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigurationError(
                f"line {number} of {path} is damaged", why=repr(error), remedy="delete that line"
            ) from None
        records.append(record)
    return records


def line_of(record: Record) -> str:
    """Return a record as a line of JSON. A number that is not finite becomes null, because JSON has none."""
    values = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
    return json.dumps(values) + "\n"


def columns(records: Sequence[Record]) -> dict[str, tuple[list[int], list[float]]]:
    """Return the steps and values of each figure, in the order of their first lines."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for record in records:
        for name, value in record.items():
            if name not in ("step", "epoch", "seconds") and (value is None or is_number(value)):
                steps, values = found.setdefault(name, ([], []))
                steps.append(record["step"])
                values.append(math.nan if value is None else value)
    return found

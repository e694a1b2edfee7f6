"""`accelcore precision`: the op table O1, and the operators of torch's own autocast on each device."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from accelcore.cli import child
from accelcore.errors import AccelError, BackendUnavailableError, ConfigurationError, PluginError, UnknownBackendError

__all__ = ["OpTables", "ask", "main", "show"]

_UNKNOWN = "by torch"  # for an operator of a device that does not work here; only its backend knows more
_LIMIT = 300  # seconds; torch is imported, and a device may be slow to start


@dataclass(frozen=True)
class OpTables:
    """O1, and torch's own tables.

    Attributes:
        o1: each operator's treatment, by its name without overload.
        torch: for each backend its `operators`, such as `"aten::mm"`, their `source`, and perhaps its `own` treatments.
        diff: whether to show only the differences between two backends.
    """

    o1: dict[str, str]
    torch: dict[str, dict[str, Any]]
    diff: bool

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield operator, treatment under O1, and for each backend whether torch's own autocast intercepts it."""
        listed = {name: {_base(operator) for operator in table["operators"]} for name, table in self.torch.items()}
        own = {name: treatment for table in self.torch.values() for name, treatment in table.get("own", {}).items()}
        known = {**own, **self.o1}
        names = known.keys() | {name for names in listed.values() for name in names}
        order = [*dict.fromkeys(self.o1.values()), _UNKNOWN]
        for name in sorted(names, key=lambda name: (order.index(known.get(name, _UNKNOWN)), name)):
            cells = tuple("listed" if name in names else "-" for names in listed.values())
            if not self.diff or len(set(cells)) > 1:
                yield (name, known.get(name, _UNKNOWN), *cells)

    def as_json(self) -> dict[str, Any]:
        """Return the tables for JSON."""
        result: dict[str, Any] = {"schema": 1, "o1": self.o1, "torch": self.torch}
        if self.diff:
            (one, first), (two, second) = ((name, set(table["operators"])) for name, table in self.torch.items())
            result["diff"] = {one: sorted(first - second), two: sorted(second - first)}
        return result


def ask(backend: str | None, diff: str | None) -> OpTables:
    """Find O1, and torch's table of `backend` and of `diff`, in a child process.

    Raises:
        ConfigurationError: torch knows no autocast of such a device.
        PluginError: the child process failed.
    """
    if diff is not None and backend in (None, diff):
        raise ConfigurationError("--diff compares two backends", remedy="give --backend another one, such as cpu")
    names = [name for name in (backend, diff) if name is not None]
    ended = child.call(__name__, *names, environ=os.environ, limit=_LIMIT)
    try:
        answer = json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        last = ended.stderr.strip().splitlines()[-1:]
        raise PluginError(
            "the op tables cannot be found", why="".join(last), remedy="accelcore doctor --deep"
        ) from error
    if "error" in answer:
        what, why, available, remedy = answer["error"]
        raise ConfigurationError(what, why=why, available=available, remedy=remedy)
    return OpTables(answer["o1"], answer["torch"], diff is not None)


def show(tables: OpTables) -> None:
    """Print the tables to stdout, in aligned columns."""
    head = ("operator", "O1", *(f"torch on {name}" for name in tables.torch))
    rows = [head, *tables.rows()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(line.rstrip() + "\n")
    for name, found in tables.torch.items():
        sys.stdout.write(
            f"{name}: {len(found['operators'])} operators of torch's own autocast, from {found['source']}\n"
        )


def _base(operator: str) -> str:
    return operator.partition("::")[2].partition(".")[0]


def main() -> int:
    """Print O1's table, and torch's own for each backend in the arguments: the child process."""
    answer: dict[str, Any] = {}
    try:
        answer["torch"] = {name: _torchs_table(name) for name in sys.argv[1:]}
    except AccelError as error:
        answer["error"] = [error.what, error.why, error.available, error.remedy]
    else:
        from accelcore.precision import O1

        answer["o1"] = {name: treatment.value for name, treatment in O1.items()}
    print(json.dumps(answer))  # noqa: T201
    return 0


def _torchs_table(name: str) -> dict[str, Any]:
    """Return the operators that torch's autocast intercepts on a backend, from the device or from torch alone."""
    from accelcore.devices.select import select

    try:
        backend = select(name)
    except (BackendUnavailableError, UnknownBackendError) as error:
        operators = _registered(name)
        if not operators:
            raise ConfigurationError(
                f"torch knows no autocast of {name!r} in this process", why=error.what, remedy=error.remedy
            ) from error
        return {"operators": operators, "source": "torch's dispatcher: no such device works here"}
    own = {operator: treatment.value for operator, treatment in backend.precision.treatments().items()}
    source = "EMULATED" if backend.emulated else "the device's backend"
    return {"operators": sorted(backend.precision.table("torch")), "source": source, "own": own}


def _registered(device_type: str) -> list[str]:
    from accelcore.torch_internals import device_dispatch_key, operators_registered_at

    try:
        return sorted(operators_registered_at(f"Autocast{device_dispatch_key(device_type)}"))
    except RuntimeError:  # torch has no such device
        return []

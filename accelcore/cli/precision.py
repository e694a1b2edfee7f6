"""`accelcore precision`: the op table O1, and the operators of torch's own autocast on each device."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import click

from accelcore.cli.options import common, device_option, json_option
from accelcore.devices.create import import_torch
from accelcore.devices.select import select
from accelcore.errors import BackendUnavailableError, ConfigurationError, UnknownBackendError

_UNKNOWN = "by torch"  # for an operator of a device that does not work here; only its backend knows more


@click.command()
@device_option("--backend", "NAME", "Also show the operators of torch's own autocast on this backend.")
@device_option("--diff", "NAME", "Show only the differences between --backend and this backend.")
@json_option
@common
def precision(backend: str | None, diff: str | None, as_json: bool) -> None:
    """Show which operator runs in which dtype under precision="O1".

    This table is called O1, and is the same on every device. torch's own autocast has another table for each device.
    With --backend it is shown beside O1, also for a device that does not work here.

    \b
    Examples:
      accelcore precision
      accelcore precision --backend cpu
      accelcore precision --backend cpu --diff cuda
    """  # noqa: D301  # click reads the backspace: what follows keeps its lines
    if diff is not None and backend in (None, diff):
        raise ConfigurationError("--diff compares two backends", remedy="give --backend another one, such as cpu")
    import_torch()
    from accelcore.precision import O1

    o1 = {name: treatment.value for name, treatment in O1.items()}
    tables = {name: _torchs_table(name) for name in (backend, diff) if name is not None}
    if not as_json:
        _show(tables, _rows(o1, tables, only_differences=diff is not None))
        return
    result: dict[str, Any] = {"schema": 1, "o1": o1, "torch": tables}
    if diff is not None:
        (one, first), (two, second) = ((name, set(table["operators"])) for name, table in tables.items())
        result["diff"] = {one: sorted(first - second), two: sorted(second - first)}
    click.echo(json.dumps(result, indent=2))


def _rows(
    o1: Mapping[str, str], tables: Mapping[str, dict[str, Any]], *, only_differences: bool
) -> Iterator[tuple[str, ...]]:
    """Yield operator, treatment under O1, and for each backend whether torch's own autocast intercepts it."""
    listed = {
        name: {operator.partition("::")[2].partition(".")[0] for operator in table["operators"]}
        for name, table in tables.items()
    }
    own = {name: treatment for table in tables.values() for name, treatment in table.get("own", {}).items()}
    known = {**own, **o1}
    names = known.keys() | {name for names in listed.values() for name in names}
    order = [*dict.fromkeys(o1.values()), _UNKNOWN]
    for name in sorted(names, key=lambda name: (order.index(known.get(name, _UNKNOWN)), name)):
        cells = tuple("listed" if name in names else "-" for names in listed.values())
        if not only_differences or len(set(cells)) > 1:
            yield (name, known.get(name, _UNKNOWN), *cells)


def _show(tables: Mapping[str, dict[str, Any]], rows: Iterable[tuple[str, ...]]) -> None:
    rows = [("operator", "O1", *(f"torch on {name}" for name in tables)), *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(line.rstrip() + "\n")
    for name, found in tables.items():
        sys.stdout.write(
            f"{name}: {len(found['operators'])} operators of torch's own autocast, from {found['source']}\n"
        )


def _torchs_table(name: str) -> dict[str, Any]:
    """Return the `operators` that torch's autocast intercepts on a backend, their `source`, and `own` treatments."""
    try:
        backend = select(name)
    except (BackendUnavailableError, UnknownBackendError) as error:
        from accelcore.torch_internals import device_dispatch_key, operators_registered_at

        try:
            operators = sorted(operators_registered_at(f"Autocast{device_dispatch_key(name)}"))
        except RuntimeError:  # torch has no such device
            operators = []
        if not operators:
            raise ConfigurationError(
                f"torch has no autocast for {name!r} in this process",
                why=error.what.removeprefix(f"device={name!r}: "),
                remedy=error.remedy,
            ) from error
        return {"operators": operators, "source": "torch's dispatcher: no such device works here"}
    own = {operator: treatment.value for operator, treatment in backend.precision.treatments().items()}
    source = "EMULATED" if backend.emulated else "the device's backend"
    return {"operators": sorted(backend.precision.table("torch")), "source": source, "own": own}

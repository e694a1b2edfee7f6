"""The group of all commands, and the small commands. Each larger command has its own file.

`lint` and `port` come with a distribution of their own, which is imported when one of them runs.
"""

from __future__ import annotations

import json
import keyword
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from accelcore.checkpoint.folders import check_export
from accelcore.cli.advise import advise
from accelcore.cli.doctor import doctor
from accelcore.cli.options import common, device_option, json_option
from accelcore.cli.parity import record, replay
from accelcore.cli.run import run
from accelcore.cli.verify import commands as verify
from accelcore.devices.create import import_torch
from accelcore.devices.plugins import BACKENDS, declared, own_plugins
from accelcore.devices.select import check_installed, select
from accelcore.errors import BackendUnavailableError, ConfigurationError, UnknownBackendError, did_you_mean, nearest
from accelcore.util.files import write_output
from accelcore.util.text import shown

_OF_LINT = {
    "lint": ("accelcore_lint.lint_command", "Find what ties a training script to one device, or is wrong on any."),
    "port": ("accelcore_lint.port.port_command", "Rewrite a training script so that it runs on every device."),
}
"""Commands of accelcore-lint: the module of each, and the line that `--help` shows."""

_UNKNOWN = "by torch"  # for an operator of a device that does not work here; only its backend knows more

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}", re.ASCII)
_PLACES = {
    **dict.fromkeys(("README.md", "pyproject.toml"), ""),
    **dict.fromkeys(("__init__.py", "backend.py", "lion.py"), "accelcore_{name}"),
    **dict.fromkeys(("test_conformance.py", "test_lion.py"), "tests"),
}
"""Folder of each file of a new backend. The files are in `template`: a backend called `hostchip`."""


class Commands(click.Group):
    """Group of accelcore's commands, and of those of accelcore-lint, whether it is installed or not."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_OF_LINT})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _OF_LINT:
            return _OfLint(cmd_name, short_help=_OF_LINT[cmd_name][1])
        found = super().get_command(ctx, cmd_name)
        if found is None and not ctx.resilient_parsing:  # a shell that completes a line wants no error
            remedy = did_you_mean(cmd_name, self.list_commands(ctx), "run a script by: accelcore run SCRIPT")
            ctx.fail(f"No such command {cmd_name!r}: {remedy}")
        return found


class _OfLint(click.Command):
    """Stand-in for a command of accelcore-lint, which is imported when the command is run or completed."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        name = str(self.name)
        if find_spec("accelcore_lint") is None:
            raise ConfigurationError(
                f"the command {name!r} is not installed",
                why="accelcore-lint brings it",
                remedy="pip install ./plugins/lint in a clone of accelcore",
            )
        command: click.Command = getattr(import_module(_OF_LINT[name][0]), name)
        return command.make_context(info_name, args, parent, **extra)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="accelcore", message="%(prog)s %(version)s")
@common
def app() -> None:
    """Write a PyTorch training script once; run it on every device.

    \b
    Examples:
      accelcore doctor                                   what works here, and what to do
      accelcore run train.py --epochs 3                  on the best device that works here
      accelcore run --nproc 2 train.py                   two ranks of one job
      accelcore run --emulate npu --device npu train.py  on an emulated device
      accelcore COMMAND --help                           options and examples of a command
    """


@app.command()
@click.option(
    "--trainer", metavar="NAME", help="The trainer whose model to write, if several trainers were saved together."
)
@click.option("--best", is_flag=True, help="Take the checkpoint with the best metric instead of the newest.")
@click.argument("checkpoint", type=click.Path())
@click.argument("file", type=click.Path())
@common
def export(trainer: str | None, checkpoint: str, file: str, *, best: bool) -> None:
    """Write the model of a checkpoint to one safetensors file.

    CHECKPOINT is a checkpoint, or a folder of checkpoints, of which the newest is used. Several ranks may have saved it
    in pieces. FILE is replaced when the new one is complete.

    \b
    Examples:
      accelcore export outputs/first model.safetensors
      accelcore export --best outputs/first model.safetensors
      accelcore export --trainer generator outputs/gan generator.safetensors
    """
    _, target = check_export(checkpoint, file)  # before torch is imported, which takes seconds
    from accelcore.checkpoint.export import export as write

    replaced, folder_is_new = target.exists(), not target.parent.exists()
    found = write(checkpoint, file, trainer=trainer, best=best)
    done = " (replaced)" if replaced else " (in a new folder)" if folder_is_new else ""
    click.echo(f"{target}{done}: model {'from' if trainer is None else f'{trainer} from'} {found}")


@app.command()
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="PNG, SVG, PDF or HTML. Default: plot.png in the folder of one run; for several runs, a new plot.png here.",
)
@click.argument("folders", nargs=-1, required=True, type=click.Path())
@common
def plot(folders: tuple[str, ...], output: str | None) -> None:
    """Plot the logs of runs side by side.

    FOLDERS are folders of accelcore.Log. The plots show loss, learning rate, and other values. An HTML page holds
    everything in one file. Needs matplotlib: pip install '.[plot]' in a clone of accelcore.

    \b
    Examples:
      accelcore plot outputs/run
      accelcore plot outputs/a outputs/b -o compare.html
    """
    from accelcore.training.monitoring.records import draw, file_for, read_records

    runs = {folder: read_records(Path(folder)) for folder in folders}
    file = file_for(list(map(Path, folders))) if output is None else Path(output)
    draw(runs, file)
    click.echo(f"{file}: {len(folders)} run{'s' if len(folders) > 1 else ''}")


@app.command("new-backend")
@click.argument("name", metavar="NAME")
@click.option("--folder", metavar="FOLDER", help="Where to write; must not exist. By default accelcore-NAME.")
@click.option(
    "--torch-device", metavar="DEVICE", default="cpu", help="torch's name of the device; the host by default."
)
@common
def new_backend(name: str, folder: str | None, torch_device: str) -> None:
    """Write the package of a backend of your own.

    It has an entry point, a backend, an optimizer kernel, and tests. It passes its tests as written, on the host or on
    --torch-device. Then replace what your device does differently.

    \b
    Examples:
      accelcore new-backend mychip
      accelcore new-backend mychip --torch-device xpu --folder plugins/mychip
    """
    written = write_backend(name, None if folder is None else Path(folder), torch_device=torch_device)
    click.echo(f"{written}: pip install --no-deps -e {written}, then accelcore verify backend {name}")


def write_backend(name: str, folder: Path | None = None, *, torch_device: str = "cpu") -> Path:
    """Write the package to a new folder, by default `accelcore-NAME` here; return the folder."""
    _check_new(name, torch_device)
    folder = Path(f"accelcore-{name}") if folder is None else folder
    if folder.exists():
        raise ConfigurationError(f"{folder} exists", remedy="name another folder with --folder, or remove it")
    for file, place in _PLACES.items():
        text = (files("accelcore.cli") / "template" / f"{file}.txt").read_text(encoding="utf-8")
        text = text.replace("hostchip", name).replace('device = "cpu"', f'device = "{torch_device}"')
        write_output(folder / place.format(name=name) / file, text.encode())
    return folder


def _check_new(name: str, torch_device: str) -> None:
    taken = {entry.name for entry in declared(BACKENDS)} | own_plugins().keys()
    for what, word in (("name", name), ("--torch-device", torch_device)):
        if not _NAME.fullmatch(word) or keyword.iskeyword(word) or word == "auto":
            raise ConfigurationError(
                f"{what} {shown(word)} is not a device's name",
                why="it must be a-z, then a-z, 0-9 or _, at most 32 characters, and not auto or a word of Python",
                remedy="choose another, such as mychip",
            )
    if name in taken:
        raise ConfigurationError(
            f"the backend {name!r} exists", remedy=f"choose another name than {', '.join(sorted(taken))}"
        )


@app.command()
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
    """
    if diff is not None and backend in (None, diff):
        raise ConfigurationError("--diff compares two backends", remedy="give --backend another one, such as cpu")
    known = {entry.name for entry in declared(BACKENDS)} | own_plugins().keys()
    for name, option in ((backend, "--backend"), (diff, "--diff")):
        if name is not None and name not in known and nearest(name, known):
            check_installed(name, option)  # raises, without waiting for torch
    import_torch()
    from accelcore.precision import O1

    o1 = {name: treatment.value for name, treatment in O1.items()}
    tables = {name: _torchs_table(name) for name in (backend, diff) if name is not None}
    if not as_json:
        _show_tables(tables, _rows_of_tables(o1, tables, only_differences=diff is not None))
        return
    result: dict[str, Any] = {"schema": 1, "o1": o1, "torch": tables}
    if diff is not None:
        (one, first), (two, second) = ((name, set(table["operators"])) for name, table in tables.items())
        result["diff"] = {one: sorted(first - second), two: sorted(second - first)}
    click.echo(json.dumps(result, indent=2))


def _rows_of_tables(
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


def _show_tables(tables: Mapping[str, dict[str, Any]], rows: Iterable[tuple[str, ...]]) -> None:
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


for _command in (advise, doctor, record, replay, run, verify):
    app.add_command(_command)

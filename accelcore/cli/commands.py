"""The commands and their options. Each command imports its implementation when it runs."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from accelcore.cli import ROLES
from accelcore.cli.brought import Commands
from accelcore.cli.comparing import advise
from accelcore.cli.options import (
    SEVERAL_MACHINES,
    common,
    device_option,
    devices,
    json_option,
    number,
    rank_count_option,
    several_machines,
)
from accelcore.cli.parity import record, replay

__all__ = ["app"]


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="accelcore", message="%(prog)s %(version)s")
@common
def app() -> None:
    """Write a PyTorch training script once; run it on every device.

    \b
    Examples:
      accelcore doctor                          what is installed, what works, what to do
      accelcore run train.py --epochs 3         on the best device that works here
      accelcore run --nproc 2 train.py          two ranks of one job
      accelcore verify backend cpu              a backend against what it promises
      accelcore new-backend mychip              the package of a backend, to start your own from
      accelcore precision --backend cpu         which operator runs in which dtype
      accelcore export outputs/a model.safetensors  the model of a checkpoint, in one file
      accelcore plot outputs/a outputs/b        the logs of two runs side by side
      accelcore record --out ref train.py       a run to compare others with
      accelcore replay ref train.py             where a run elsewhere parts from it
      accelcore advise train.py                 which precision is quickest and still trains alike
      accelcore lint train.py                   what ties a script to one device, or is wrong on any
      accelcore completion bash                 completion for your shell
    """  # noqa: D301  # click reads the backspace: what follows keeps its lines


@app.command()
@json_option
@click.option("--deep", is_flag=True, help="Also import torch and try each usable backend, in processes of their own.")
@number("--timeout", "SECONDS", 60, "How long one trial of --deep may take.", most=86400)
@common
def doctor(as_json: bool, deep: bool, timeout: int) -> int:
    """Report which backends work here, why the others do not, and what to do.

    Asks plugins and reads package metadata, and touches no device. If `import torch` also loads other packages, a child
    process tries it. With --deep, child processes import torch and multiply two small matrices on every usable
    backend, so that a crash or a hang is reported.

    \b
    Exit code:
      0   every plugin answered, and at least one backend is usable
      1   something is broken: import torch, a plugin, versions that do not fit, a trial of --deep; or select() raises
      2   no backend is usable, broken or not, and import torch was not seen to fail
      64  the request is invalid

    \b
    Examples:
      accelcore doctor
      accelcore doctor --deep --timeout 120
      accelcore doctor --json | python -m json.tool
    """  # noqa: D301  # click reads the backspace: what follows keeps its lines
    from accelcore.cli.doctor import diagnosis, layout

    found = diagnosis.diagnose(deep_timeout=timeout if deep else None)
    layout.show(found, as_json=as_json)
    return found.exit_code


_AFTER_THE_SCRIPT = {"allow_interspersed_args": False}  # options after the script are the script's own


@app.command(context_settings=_AFTER_THE_SCRIPT)
@device_option(
    "--device",
    "DEVICE",
    "What select() chooses in the script, as ACCEL_DEVICE does: NAME, NAME:INDEX, a list, or auto.",
)
@rank_count_option
@number(
    "--max-restarts", "K", 0, "How often torch's elastic launcher starts all ranks again after one has died.", least=0
)
@several_machines
@click.option(
    "--check-collectives",
    is_flag=True,
    help="Compare each collective over all ranks before it runs, which is slow, and raise if they do not match.",
)
@device_option(
    "--emulate", "NAME", "Run on an emulation of the backend NAME, on this host; its emulator must be installed."
)
@click.option("--apex", is_flag=True, help="Let `import apex` in the script and its ranks find accelcore.apex.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")
@click.argument("script", type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@common
def run(script: str, arguments: tuple[str, ...], **options: Any) -> None:
    """Run a script, or with -m a module, on the device of your choice.

    Options of accelcore go before SCRIPT, the script's own after it: in `accelcore run train.py --device cpu` the
    script gets --device. With one rank this process becomes the script,
    with its exit code and its signals. If one of several ranks fails, all end, and the last line names the first.

    \b
    Examples:
      accelcore run train.py --epochs 3
      accelcore run --device cpu train.py
      accelcore run --device npu,cuda,cpu -m mypackage.train
      accelcore run --nproc auto train.py
      accelcore run --nproc 2 --max-restarts 1 train.py
      accelcore run --nproc 8 --nnodes 2 --node-rank 0 --rdzv-endpoint node0:29400 train.py
      accelcore run --emulate npu --device npu train.py
      accelcore run --apex train.py
    """  # noqa: D301  # click reads the backspace: what follows keeps its lines
    from accelcore.cli.run import run

    machines = {name: options.pop(name[2:].replace("-", "_")) for name in SEVERAL_MACHINES}
    given = {name: value for name, value in machines.items() if value is not None}
    run(script, arguments, machines=given, nproc=options.pop("nproc") or None, **options)


@app.group()
def verify() -> None:
    """Test whether a backend works as it declares.

    \b
    Examples:
      accelcore verify backend cpu
      accelcore verify backend cpu --only scaler
    """  # noqa: D301  # click reads the backspace: what follows keeps its lines


@verify.command("backend")
@click.argument("name", shell_complete=devices)
@json_option
@click.option(
    "--only",
    metavar="ROLE",
    type=click.Choice(ROLES),
    multiple=True,
    help="Test only this part: backend, operators, training, or one of the six roles. May be given several times.",
)
@click.option("--deep", is_flag=True, help="Compare all of torch's operators with the CPU; takes minutes.")
@number("--timeout", "SECONDS", 300, "How long one test may take.", most=86400)
@common
def verify_backend(name: str, as_json: bool, only: tuple[str, ...], deep: bool, timeout: int) -> int:
    """Run the conformance suite on the backend NAME, and print its scorecard.

    Declared features are tested; other features must be refused with UnsupportedError. A test that crashes or hangs has
    failed, and the other tests still run. Needs pytest: pip install 'accelcore[testing]'.

    \b
    Exit code:
      0   it conforms: nothing failed
      1   something failed
      64  the request is invalid, or the backend cannot be used here

    \b
    Examples:
      accelcore verify backend cpu
      accelcore verify backend cuda:1 --only precision --only training
      accelcore verify backend npu --only operators --deep --timeout 60
      accelcore verify backend cpu --json > scorecard.json
    """  # noqa: D301  # click reads the backspace: what follows keeps its lines
    from accelcore.cli import verify as suite

    card = suite.verify(name, roles=only, timeout=timeout, deep=deep)
    if as_json:
        click.echo(json.dumps(card.as_json(), indent=2))
    else:
        suite.show(card, tracebacks=click.get_current_context().obj.debug)
    return 0 if card.conforms else 1


@app.command()
@device_option("--backend", "NAME", "Also show the operators of torch's own autocast on this backend.")
@device_option("--diff", "NAME", "Show only the differences between --backend and this backend.")
@json_option
@common
def precision(backend: str | None, diff: str | None, as_json: bool) -> None:
    """Show the op table O1: which operator runs in which dtype under autocast, on every device.

    torch has a different table for each device. The table of a device that does not work here is read from torch.

    \b
    Examples:
      accelcore precision
      accelcore precision --backend cpu
      accelcore precision --backend cpu --diff cuda
    """  # noqa: D301  # click reads the backspace: what follows keeps its lines
    from accelcore.cli import precision as tables

    found = tables.find(backend, diff)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    else:
        tables.show(found)


@app.command()
@click.option(
    "--trainer", metavar="NAME", help="The trainer whose model to write, if several trainers were saved together."
)
@click.option("--best", is_flag=True, help="Take the checkpoint with the lowest metric instead of the newest.")
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
    """  # noqa: D301  # click reads the backspace: what follows keeps its lines
    from accelcore.checkpoint.export import export as write

    found = write(checkpoint, file, trainer=trainer, best=best)
    click.echo(f"{file}: the model of {found}" if trainer is None else f"{file}: the model of {trainer} of {found}")


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
    """Plot the logs of runs side by side: loss, learning rate, and what else they have.

    FOLDERS are folders of accelcore.Log. An HTML page holds everything in one file. Needs matplotlib: pip
    install 'accelcore[plot]'.

    \b
    Examples:
      accelcore plot outputs/run
      accelcore plot outputs/a outputs/b -o compare.html
    """  # noqa: D301  # click reads the backspace: what follows keeps its lines
    from pathlib import Path

    from accelcore.training.monitoring.plot import draw, file_for
    from accelcore.training.monitoring.records import read_records

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
    """Write the package of a backend NAME: entry point, backend, an optimizer kernel, and tests.

    It passes its tests as written, on the host or on --torch-device. Then replace what your device does differently.

    \b
    Examples:
      accelcore new-backend mychip
      accelcore new-backend mychip --torch-device xpu --folder plugins/mychip
    """  # noqa: D301  # click reads the backspace: what follows keeps its lines
    from pathlib import Path

    from accelcore.cli.new_backend import missing_device, write_backend

    written = write_backend(name, None if folder is None else Path(folder), torch_device=torch_device)
    if missing := missing_device(torch_device):
        where = written / f"accelcore_{name}" / "backend.py"
        click.echo(
            f"accelcore: {missing}: in {where}, import the vendor's package that registers it, or correct its name",
            err=True,
        )
    click.echo(f"{written}: pip install --no-deps -e {written}, then accelcore verify backend {name}")


@app.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@common
def completion(shell: str) -> None:
    """Print the script with which your shell completes accelcore's commands, options and devices.

    \b
    Examples:
      eval "$(accelcore completion bash)"                                      in ~/.bashrc
      eval "$(accelcore completion zsh)"                                       in ~/.zshrc
      accelcore completion fish > ~/.config/fish/completions/accelcore.fish    once
    """  # noqa: D301  # click reads the backspace: what follows keeps its lines
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click knows each of the choices"
    sys.stdout.write(kind(app, {}, "accelcore", "_ACCELCORE_COMPLETE").source())


app.add_command(advise)
app.add_command(record)
app.add_command(replay)

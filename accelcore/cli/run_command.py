"""`accelcore run` and its options."""

from __future__ import annotations

import click

from accelcore.cli.options import common, devices

__all__ = ["run"]

_AFTER_THE_SCRIPT = {"allow_interspersed_args": False}  # options after the script are the script's own


@click.command(context_settings=_AFTER_THE_SCRIPT)
@click.option(
    "--device",
    metavar="DEVICE",
    shell_complete=devices,
    help="What select() chooses in the script, as ACCEL_DEVICE does: NAME, NAME:INDEX, a list, or auto.",
)
@click.option(
    "--nproc",
    metavar="N",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many ranks to start on this machine; more than 1 through torch's elastic launcher.",
)
@click.option(
    "--nnodes", metavar="M", type=click.IntRange(min=1), help="How many machines the job has; run it on each."
)
@click.option("--node-rank", metavar="K", type=click.IntRange(min=0), help="Which of them this is, counted from 0.")
@click.option("--rdzv", metavar="HOST:PORT", help="Where they meet: machine 0, and a port that is free on it.")
@click.option(
    "--max-restarts",
    metavar="K",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How often torch's elastic launcher starts all ranks again after one has died.",
)
@click.option(
    "--check-collectives",
    is_flag=True,
    help="Compare each collective over all ranks before it runs, which is slow, and raise where they do not match.",
)
@click.option(
    "--emulate",
    metavar="NAME",
    shell_complete=devices,
    help="Run on an emulation of the backend NAME, on this host; for those whose emulator is installed.",
)
@click.option("--apex", is_flag=True, help="Let `import apex` in the script, and its ranks, find accelcore.apex.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")
@click.argument("script", type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@common
def run(
    device: str | None,
    nproc: int,
    nnodes: int | None,
    node_rank: int | None,
    rdzv: str | None,
    max_restarts: int,
    check_collectives: bool,
    emulate: str | None,
    apex: bool,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run a script, or with -m a module, on the device of your choice.

    Options of accelcore go before SCRIPT, the script's own after it. With one rank this process becomes the script,
    with its exit code and its signals. If one of several ranks dies, all end, and its traceback is shown.

    \b
    Examples:
      accelcore run train.py --epochs 3
      accelcore run --device cpu train.py
      accelcore run --device npu,cuda,cpu -m mypackage.train
      accelcore run --nproc 2 --max-restarts 1 train.py
      accelcore run --nproc 8 --nnodes 2 --node-rank 0 --rdzv node0:29400 train.py
      accelcore run --emulate npu --device npu train.py
      accelcore run --apex train.py
    """  # noqa: D301  # click reads the backspace: what follows keeps its lines
    from accelcore.cli import elastic, launch

    launch.run(
        script,
        arguments,
        module=module,
        device=device,
        nproc=nproc,
        machines=elastic.machines_of(nnodes, node_rank, rdzv),
        max_restarts=max_restarts,
        check_collectives=check_collectives,
        emulate=emulate,
        apex=apex,
    )

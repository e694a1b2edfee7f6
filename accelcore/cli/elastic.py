"""How torch's elastic launcher is called, for one machine and for several."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass

from accelcore.cli import rank
from accelcore.environment import shown
from accelcore.errors import ConfigurationError

__all__ = ["BACKEND", "NODE", "Machines", "arguments", "machines_of"]

BACKEND = "numbered"
"""The rendezvous of `accelcore.cli.rendezvous`, in the launcher's `--rdzv-backend`."""

NODE = "node"
"""The machine's number, in its `--rdzv-conf`."""

_PROGRAM = "accelcore.cli.launcher"  # not imported: it imports torch
_ENDPOINT = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/@]+):([1-9][0-9]{0,4})")


@dataclass(frozen=True)
class Machines:
    """The machines of a job.

    Attributes:
        count: how many there are.
        number: which this is.
        endpoint: where the others reach machine 0, HOST:PORT.
    """

    count: int
    number: int
    endpoint: str


def machines_of(count: int | None, number: int | None, endpoint: str | None) -> Machines | None:
    """What `--nnodes`, `--node-rank` and `--rdzv` say together; None where they are not given, which is one machine.

    Raises:
        ConfigurationError: some are given and others not; there is no machine of that number; or `endpoint` is not
            HOST:PORT.
    """
    given = {"--nnodes": count, "--node-rank": number, "--rdzv": endpoint}
    missing = [option for option, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if count is None or number is None or endpoint is None:
        raise ConfigurationError(
            f"{' and '.join(option for option in given if option not in missing)} without {' and '.join(missing)}",
            why="a job of several machines has to be told how many there are, which this is, and where they meet",
            remedy="give all three, on each machine: --nnodes 2 --node-rank 0 --rdzv HOST:PORT",
        )
    if count < 2:
        raise ConfigurationError(
            f"--nnodes {count} with --node-rank and --rdzv",
            remedy="leave all three out for a job of one machine",
        )
    if number >= count:
        raise ConfigurationError(
            f"--node-rank {number} in a job of --nnodes {count}", available=f"0 to {count - 1}", remedy="count from 0"
        )
    port = _ENDPOINT.fullmatch(endpoint)
    if port is None or int(port[1]) > 65535:
        raise ConfigurationError(
            f"--rdzv {shown(endpoint)} is not HOST:PORT",
            why="it is where the other machines reach machine 0: its name or address, and a port from 1 to 65535",
            remedy="for example --rdzv node07:29400, or --rdzv [fe80::1]:29400",
        )
    return Machines(count, number, endpoint)


def arguments(nproc: int, max_restarts: int, machines: Machines | None) -> list[str]:
    """The arguments of Python that start torch's elastic launcher, and of that which start a rank."""
    if machines is None:
        meeting = ["--standalone"]
    else:
        meeting = [
            "--nnodes", str(machines.count), "--rdzv-id", "accelcore", "--rdzv-backend", BACKEND,
            "--rdzv-endpoint", machines.endpoint,
            "--rdzv-conf", f"{NODE}={machines.number},is_host={int(machines.number == 0)}",
        ]  # fmt: skip
    return [
        "-m", _PROGRAM, *meeting,
        "--nproc-per-node", str(nproc), "--max-restarts", str(max_restarts),
        # Behind --, because the launcher would take issue with options of the script's that resemble its own.
        # Isolated: a file in the script's folder may have the name of a module. The launcher's process id is that of
        # this process, which becomes it.
        "--no-python", "--", sys.executable, "-IS", rank.__file__, str(os.getpid()),
    ]  # fmt: skip

"""Environment variables, read strictly: an invalid value is an error that names the variable.

A variable of accelcore's own (`ACCEL_...`) that is empty counts as unset: a shell, a compose file or a manifest has no
other way to say so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from accelcore.errors import ConfigurationError

__all__ = ["JOB_VARIABLES", "Launch", "outside_any_job", "probe_timeout", "read_launch", "requested_device", "shown"]

JOB_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher such as torchrun tells each rank of a job."""

_NATURAL = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class Launch:
    """This process's place in a job: which rank of how many, and where the ranks meet.

    Attributes:
        rank: 0 <= rank < world_size.
        world_size: number of processes in the job.
        local_rank: this rank's number on its host; None where the launcher does not say.
        init_method: where the ranks meet: `"env://"`, `"tcp://host:port"` or `"file:///shared/path"`.
    """

    rank: int
    world_size: int
    local_rank: int | None
    init_method: str

    def __post_init__(self) -> None:
        for name in ("rank", "world_size", "local_rank"):
            value = getattr(self, name)
            if type(value) is not int and (name, value) != ("local_rank", None):
                raise ConfigurationError(f"{name}={value!r} is not a whole number", remedy="give an int")
        if self.world_size < 1:
            raise ConfigurationError(f"world_size={self.world_size} is less than 1", remedy="give 1 or more")
        if not 0 <= self.rank < self.world_size:
            raise ConfigurationError(
                f"rank={self.rank} is outside a job of world_size={self.world_size}",
                available=f"ranks 0 to {self.world_size - 1}",
                remedy="give every process its own rank, counted from 0",
            )
        if self.local_rank is not None and not 0 <= self.local_rank < self.world_size:
            raise ConfigurationError(
                f"local_rank={self.local_rank} is outside a job of world_size={self.world_size}",
                remedy="number the processes of each host from 0",
            )


def read_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Read what a launcher such as torchrun left for this rank; None where no launcher started this process.

    LOCAL_RANK may be missing, as some schedulers leave it out. Where the whole job runs on one host, which a job of
    one process or LOCAL_WORLD_SIZE tells, it is RANK; elsewhere the result has no local rank.

    Raises:
        ConfigurationError: RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT is missing, or one of them, LOCAL_RANK or
            LOCAL_WORLD_SIZE is invalid or contradicts the others. No device is touched and no socket opened.
    """
    environ = os.environ if environ is None else environ
    if not any(variable in environ for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return None
    world_size = _natural(environ, "WORLD_SIZE", low=1)
    rank = _natural(environ, "RANK", below=(world_size, "WORLD_SIZE"))
    local_size = world_size
    if "LOCAL_WORLD_SIZE" in environ:
        local_size = _natural(environ, "LOCAL_WORLD_SIZE", low=1)
        if local_size > world_size:
            raise ConfigurationError(f"LOCAL_WORLD_SIZE={local_size} is more than WORLD_SIZE={world_size}")
    local_rank: int | None = None
    if "LOCAL_RANK" in environ:
        local_rank = _natural(environ, "LOCAL_RANK", below=(local_size, "the ranks on this host"))
    elif world_size == 1 or ("LOCAL_WORLD_SIZE" in environ and local_size == world_size):
        local_rank = rank
    if not environ.get("MASTER_ADDR", "").strip():
        raise _invalid(environ, "MASTER_ADDR", "it names the host where rank 0 listens")
    port = _natural(environ, "MASTER_PORT", low=1)
    if port > 65535:
        raise _invalid(environ, "MASTER_PORT", "a port is at most 65535")
    return Launch(rank=rank, world_size=world_size, local_rank=local_rank, init_method="env://")


def requested_device() -> str | None:
    """The request in ACCEL_DEVICE, as written; None where it is unset or empty."""
    return os.environ.get("ACCEL_DEVICE") or None


def outside_any_job(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process that is no rank of the job to which this process may belong."""
    return {name: value for name, value in environ.items() if name not in JOB_VARIABLES}


def probe_timeout() -> float:
    """Seconds a plugin may take to load and answer its probe: ACCEL_PROBE_TIMEOUT, 5 by default."""
    text = os.environ.get("ACCEL_PROBE_TIMEOUT") or "5"
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", text, re.ASCII) or float(text) == 0:
        raise ConfigurationError(
            f"ACCEL_PROBE_TIMEOUT={shown(text)} is not a number of seconds above 0",
            remedy="set it to a number such as 5 or 0.5, or unset it",
        )
    return float(text)


def shown(text: str, limit: int = 60) -> str:
    """Quote a value for a message: printable whatever it holds, and short."""
    return ascii(text) if len(text) <= limit else f"{text[:limit]!a}... ({len(text)} characters)"


def _natural(environ: Mapping[str, str], variable: str, *, low: int = 0, below: tuple[int, str] | None = None) -> int:
    text = environ.get(variable)
    if text is None or not _NATURAL.fullmatch(text):
        raise _invalid(environ, variable, f"it must be a whole number, {low} or more")
    value = int(text)
    if value < low:
        raise _invalid(environ, variable, f"it must be {low} or more")
    if below is not None and value >= below[0]:
        raise _invalid(environ, variable, f"it must be less than {below[1]} ({below[0]})")
    return value


def _invalid(environ: Mapping[str, str], variable: str, rule: str) -> ConfigurationError:
    text = environ.get(variable)
    state = "is not set" if text is None else f"is {shown(text)}"
    return ConfigurationError(
        f"the environment variable {variable} {state}",
        why=rule,
        remedy="start the script with torchrun, which sets them all, or unset RANK, WORLD_SIZE and LOCAL_RANK "
        "to run one process",
    )

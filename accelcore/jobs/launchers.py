"""Launchers: the environment variables of each, and this process's place in the job.

One table has everything about every launcher. Values are read strictly: a contradiction raises an error that names the
variable, and nothing is guessed.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from accelcore.errors import ConfigurationError
from accelcore.util.text import shown

__all__ = ["Launch"]

_NATURAL = re.compile(r"0|[1-9][0-9]{0,8}")
_FIRST_HOST = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")  # a comma in brackets is within one item of a list of hosts
_LOWEST_PORT, _PORTS = 10000, 20000  # below those that systems give to clients


@dataclass(frozen=True)
class Launcher:
    """One launcher, by the names of the variables that it sets; "" if it has none."""

    name: str  # the launcher's name, for messages
    signs: tuple[str, ...]  # it started this process if one of these is set, and no earlier launcher of the table did
    rank: str  # this process's number in the job
    world_size: str  # the number of processes in the job
    local_rank: str  # this process's number on this host
    local_world_size: str = ""  # the number of processes on this host
    hosts: str = ""  # the number of hosts
    host_list: str = ""  # the hosts' names, rank 0's first, as in `node[07-09],login`
    job: tuple[str, ...] = ()  # variables that together identify the job on its hosts
    # whether it sets MASTER_ADDR and MASTER_PORT. If not, the address follows from `host_list` or from a job on one
    # host, and the port from `job`.
    sets_meeting: bool = False
    # variables and regular expressions; if one matches, each process sees only its own devices
    own_devices: tuple[tuple[str, str], ...] = ()


LAUNCHERS = (
    Launcher(
        name="torchrun, accelcore run or Ray Train",
        signs=("LOCAL_RANK",),
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size="LOCAL_WORLD_SIZE",
        sets_meeting=True,
    ),
    Launcher(
        name="Kubernetes' PyTorchJob, or a scheduler like it",
        signs=("RANK", "WORLD_SIZE"),
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size="LOCAL_WORLD_SIZE",
        hosts="PET_NNODES",
        sets_meeting=True,
    ),
    # Before srun: mpirun may start its ranks through srun, and they inherit variables that are not theirs.
    Launcher(
        name="Open MPI's mpirun",
        signs=("OMPI_COMM_WORLD_RANK",),
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE",),
    ),
    Launcher(
        name="MPICH's or Intel MPI's mpirun",
        signs=("MPI_LOCALRANKID",),  # PMI_RANK is also set under srun --mpi=pmi2
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
    ),
    Launcher(
        name="SLURM's srun",
        signs=("SLURM_STEP_NUM_TASKS",),  # SLURM_PROCID and SLURM_NTASKS are also set in a batch script, outside srun
        rank="SLURM_PROCID",
        world_size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        # Not SLURM_LAUNCH_NODE_IPADDR: srun may have been called on a machine that runs no rank.
        host_list="SLURM_STEP_NODELIST",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        own_devices=(
            # The daemon sets the first for each task; sbatch and salloc set the others, for their own options only.
            ("SLURMD_TRES_BIND", r"(?<!nic):(verbose,)?(closest|map|mask|per_task|single)"),
            ("SLURM_GPUS_PER_TASK", "."),
            ("SLURM_TRES_PER_TASK", "gres/"),  # it may also be of CPUs alone
            ("SLURM_GPU_BIND", "single|per_task|map_gpu|mask_gpu"),
        ),
    ),
)
"""Every launcher. The first that is detected is used."""

_NAMES = ((one.rank, one.world_size, one.local_rank, one.local_world_size, *one.signs) for one in LAUNCHERS)
JOB_VARIABLES = tuple(dict.fromkeys(filter(None, (*chain(*_NAMES), "MASTER_ADDR", "MASTER_PORT"))))
"""The variables that launchers set for each rank of a job."""


@dataclass(frozen=True)
class Launch:
    """This process's place in a job.

    Attributes:
        rank: 0 <= rank < world_size.
        world_size: number of processes in the job.
        local_rank: this rank's number on its host; None if the launcher does not set it.
        init_method: the meeting point of the ranks: `"env://"`, `"tcp://host:port"` or `"file:///shared/path"`.
        own_devices: whether each process sees only its own devices, counted from 0.
    """

    rank: int
    world_size: int
    local_rank: int | None
    init_method: str
    own_devices: bool = False

    def __post_init__(self) -> None:
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
    """Read the variables of the launcher that started this process; return None if there is no launcher.

    One process is not a job either, if its launcher sets no meeting point (srun, mpirun): the result is None.

    If the local rank is not set, it is derived in a job on one host, and in a job with one rank on each host. Otherwise
    it is None.

    Raises:
        ConfigurationError: a variable is missing, empty or invalid, or contradicts the others.
    """
    environ = {name: text for name, text in (os.environ if environ is None else environ).items() if text}
    for launcher in LAUNCHERS:
        if any(sign in environ for sign in launcher.signs):
            return _Reader(launcher, environ).read()
    return None


def outside_any_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a child process that is not a rank of this process's job."""
    return {name: value for name, value in environ.items() if name not in JOB_VARIABLES}


class _Reader:
    def __init__(self, launcher: Launcher, environ: Mapping[str, str]) -> None:
        self._launcher, self._environ = launcher, environ

    def read(self) -> Launch | None:
        launcher = self._launcher
        world_size = self._natural(launcher.world_size, low=1)
        rank = self._natural(launcher.rank, below=(world_size, launcher.world_size))
        local_size = self._optional(launcher.local_world_size, low=1)
        if local_size is not None and local_size > world_size:
            raise ConfigurationError(
                f"{launcher.local_world_size}={local_size} is more than {launcher.world_size}={world_size}",
                remedy="set both as they are: the number of ranks on this host, and that of all ranks",
            )
        bound = (world_size if local_size is None else local_size, "the ranks on this host")
        local_rank = self._optional(launcher.local_rank, below=bound)
        if local_rank is None:
            if world_size in (1, local_size):
                local_rank = rank
            elif self._optional(launcher.hosts, low=1) == world_size:
                local_rank = 0
        if world_size == 1 and not launcher.sets_meeting:
            return None
        address, port = self._address(one_host=world_size == local_size), self._port()
        if launcher.sets_meeting:
            return Launch(rank, world_size, local_rank, "env://")
        host = f"[{address}]" if ":" in address else address
        own_devices = any(re.search(text, self._environ.get(name, "")) for name, text in launcher.own_devices)
        return Launch(rank, world_size, local_rank, f"tcp://{host}:{port}", own_devices)

    def _address(self, *, one_host: bool) -> str:
        launcher, told = self._launcher, self._environ.get("MASTER_ADDR")
        if told is None and not launcher.sets_meeting:
            hosts = _FIRST_HOST.match(self._environ.get(launcher.host_list, ""))
            if hosts is not None:
                return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", hosts[0])
            if one_host:
                return "127.0.0.1"
        if told is None or not told.strip():
            raise self._invalid("MASTER_ADDR", "it must name the host of rank 0")
        return told

    def _port(self) -> int:
        launcher = self._launcher
        if "MASTER_PORT" not in self._environ and launcher.job and all(name in self._environ for name in launcher.job):
            job = " ".join(self._environ[name] for name in launcher.job)
            return _LOWEST_PORT + zlib.crc32(job.encode()) % _PORTS
        port = self._natural("MASTER_PORT", low=1)
        if port > 65535:
            raise self._invalid("MASTER_PORT", "a port is at most 65535")
        return port

    def _optional(self, variable: str, *, low: int = 0, below: tuple[int, str] | None = None) -> int | None:
        return self._natural(variable, low=low, below=below) if variable in self._environ else None

    def _natural(self, variable: str, *, low: int = 0, below: tuple[int, str] | None = None) -> int:
        text = self._environ.get(variable)
        if text is None or not _NATURAL.fullmatch(text) or int(text) < low:
            raise self._invalid(variable, f"it must be a whole number, {low} or more")
        if below is not None and int(text) >= below[0]:
            raise self._invalid(variable, f"it must be less than {below[1]} ({below[0]})")
        return int(text)

    def _invalid(self, variable: str, rule: str) -> ConfigurationError:
        launcher, text = self._launcher, self._environ.get(variable)
        state = "is not set" if text is None else f"is {shown(text)}"
        found = next(sign for sign in launcher.signs if sign in self._environ)
        remedy = f"start the script by {launcher.name}; for one process, unset {found}"
        if launcher.sets_meeting:
            all_set = "use a launcher that sets all of them, such as torchrun"
            remedy = f"{all_set}; for one process, unset RANK, WORLD_SIZE and LOCAL_RANK"
        elif variable in ("MASTER_ADDR", "MASTER_PORT"):
            remedy = f"set {variable} to the same value for all ranks"
        why = f"{rule}. {found} is set, as by {launcher.name}"
        return ConfigurationError(f"the environment variable {variable} {state}", why=why, remedy=remedy)

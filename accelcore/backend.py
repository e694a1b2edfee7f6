"""Backend: one device, ready to use, composed of six roles.

This module imports no torch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from accelcore.devices import Capabilities as Capabilities  # plugins may import it from here
from accelcore.devices import Probe, Roles
from accelcore.errors import ConfigurationError, Hinted
from accelcore.jobs.launchers import Launch, read_launch
from accelcore.util.text import is_number

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn
    from torch.optim import Optimizer
    from typing_extensions import Never, Unpack

    from accelcore.jobs.job import Job
    from accelcore.precision.role import Autocast
    from accelcore.training.options import TrainerOptions
    from accelcore.training.trainer import Trainer

_LOOP = "write trainer = accel.trainer(model, optimizer, loss=...), and in its loop trainer(batch)"
_JOB = "write `with accel.distributed() as job:`, and use the job"
_HINTS = {
    **dict.fromkeys(("prepare", "setup", "backward", "accumulate", "clip_grad_norm_"), _LOOP),
    **dict.fromkeys(("print", "gather", "rank", "world_size", "is_main", "is_main_process"), _JOB),
    **dict.fromkeys(("save_state", "load_state"), "write trainer.save(folder) and trainer.resume(folder)"),
    "launch": "remove it, and start ranks by accelcore run --nproc 2 train.py",
    "seed": "write accel.runtime.seed(0)",
    "to_device": "write accel.runtime.to_device(batch); a trainer moves its batches itself",
}

_MISSING: Any = None  # a default, so that the trainer names what is wrong


@dataclass(frozen=True, repr=False)
class Backend(Roles, Hinted):
    """One device, ready to use. `accelcore.select()` makes it; a process may have several.

    Backends of one kind of device share the vendor's runtime and its process-wide settings. Creating one may change
    some of them, such as the current device; the plugin's README lists which.

    A copy of a backend is the backend itself. It is pickled as its name and index, and unpickling selects that device.

    Attributes:
        name: the kind of device, such as `"cuda"`.
        index: its number, such as 1 for `cuda:1`.
        emulated: whether the host imitates the device. Results are then correct, but times mean nothing.
        capabilities: what the backend declares. Everything else raises `UnsupportedError`.
        precision: autocast, and how exact fp32 is.
        scaler: loss scaling.
        optimizers: optimizers by name.
        collectives: exchange between ranks.
        compiler: compilation of modules.
        runtime: random numbers, transfers and memory of the device.
        passed_over: what `auto` or a preference list could not use before this device, and why.
    """

    passed_over: tuple[Probe, ...] = ()
    _hints = _HINTS

    def autocast(
        self, dtype: torch.dtype | str | None = None, *, enabled: bool = True, table: str = "torch"
    ) -> Autocast:
        """Return a context of mixed precision for a forward pass, or a decorator; see `Precision.autocast`.

        Example:
            >>> with accel.autocast("bf16"):
            ...     output = model(batch)
            >>> output.dtype
            torch.bfloat16

        Args:
            dtype: a dtype or its name, such as `"bf16"`. `"best"` is the fastest that the backend declares. With fp32
                the context switches autocast off.
        """
        from accelcore.precision.policy import autocast_dtype
        from accelcore.precision.role import Autocast, fastest_dtype

        if dtype is not None:
            dtype = autocast_dtype(dtype, lambda: fastest_dtype(self.precision, self.capabilities.autocast_dtypes))
            enabled = enabled and dtype is not None
        return Autocast(partial(self.precision.autocast, dtype, enabled=enabled, table=table))

    def loading(self) -> dict[str, Any]:
        """Return the arguments of a DataLoader that suit this device: `DataLoader(data, 32, **accel.loading())`.

        Batches are pinned if that makes transfers faster.
        """
        return {"pin_memory": self.capabilities.pinned_memory}

    def trainer(
        self, model: nn.Module, optimizer: Optimizer = _MISSING, *unnamed: Never, **options: Unpack[TrainerOptions]
    ) -> Trainer:
        """Prepare a model and its optimizer for training on this device.

        The options are `loss`, `scheduler`, `precision`, `accumulate`, `clip_norm`, `parallel`, `compile` and more:
        `print(accelcore.TrainerOptions.__doc__)` lists all with their defaults. The page "Training" introduces them.

        Example:
            >>> trainer = accel.trainer(model, optimizer, loss=loss, accumulate=2, clip_norm=1.0)
            >>> value = trainer(batch)  # trains on a batch, and returns its loss
        """
        from accelcore.training.trainer import Trainer

        if unnamed:
            remedy = "name them: accel.trainer(model, optimizer, loss=...); give data to trainer.batches(loader)"
            raise ConfigurationError("accel.trainer(...) takes options by name only", remedy=remedy)
        return Trainer(self, model, optimizer, **options)

    def replicate(self, module: nn.Module, **options: Any) -> nn.Module:
        """Return a module for a loop without a trainer, whose backward pass averages gradients over the job's ranks.

        The module is moved to the device. In a job of one process it is returned as it is; otherwise it is wrapped in
        torch's DistributedDataParallel. Use the original module for anything but forward passes, such as saving.

        Args:
            module: if ranks differ, all take rank 0's parameters and buffers.
            options: DistributedDataParallel's, such as `find_unused_parameters=True`. One process ignores them.

        Raises:
            UnsupportedError: the job has several ranks and the backend does not declare `"ddp"`.
        """
        from accelcore.training.parallel.ddp import replicate

        return replicate(self, module, **options)

    def distributed(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        local_rank: int | None = None,
        init_method: str = "env://",
        timeout: timedelta | float | None = None,
    ) -> AbstractContextManager[Job]:
        """Return a context in which this process is a rank of its job; without a job it is rank 0 of 1.

        The job ends with the block; `join` is for a script without a block. Without arguments, the launcher's
        environment variables describe the job. A script that spawns its own ranks gives `rank` and `world_size`. A
        process group that the script has already formed is used, and is not closed.

        Example:
            >>> with accel.distributed() as job:
            ...     job.print(f"rank {job.rank} of {job.world_size}")
            rank 0 of 1

        Args:
            rank: this process's rank, counted from 0.
            world_size: the number of ranks.
            local_rank: this rank's number on its host; `rank` unless given.
            init_method: address at which ranks meet: `"env://"` (MASTER_ADDR, MASTER_PORT), `"tcp://host:port"`, `"file://..."`.
            timeout: how long a collective waits for other ranks, in seconds or as a timedelta; None is torch's default.

        Returns:
            A context manager that yields the `Job`.

        Raises:
            ConfigurationError: an argument or a variable is invalid; no device was touched.
            DistributedError: the ranks could not meet, or a rank was lost in the block. The message names it.
        """
        from accelcore.jobs.job import NotJoined, membership

        launch, limit = _launch(rank, world_size, local_rank, init_method), _duration(timeout)
        return NotJoined(partial(membership, self.collectives, launch, limit))

    def join(self, **place: Any) -> Job:
        """Join the job for the rest of the process, as `distributed` does for a block: `job = accel.join()`.

        The job is left when the interpreter exits: at once if an error ended the script, otherwise when all ranks have
        come, or after a minute.

        Args:
            place: the arguments of `distributed`.
        """
        from accelcore.jobs.job import join

        return join(self.distributed(**place))

    def __repr__(self) -> str:
        kind = " (emulated)" if self.emulated else ""
        return f"<{type(self).__name__} {self.name}:{self.index}{kind}>"

    def __copy__(self) -> Backend:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        return self

    def __reduce__(self) -> tuple[Callable[[str], Backend], tuple[str]]:
        # The function is found by name, because selection imports this module.
        return resolve_name("accelcore.devices.select:select"), (f"{self.name}:{self.index}",)


def _launch(rank: int | None, world_size: int | None, local_rank: int | None, init_method: str) -> Launch | None:
    """Return the place in the job that the arguments of `distributed`, or the environment, describe."""
    if (rank is None) != (world_size is None):
        raise ConfigurationError("rank and world_size come together", remedy="give both, or neither")
    if rank is None and local_rank is not None:
        raise ConfigurationError("local_rank needs rank and world_size", remedy="give all three, or none")
    if rank is None or world_size is None:
        return read_launch()
    return Launch(rank, world_size, rank if local_rank is None else local_rank, init_method)


def _duration(timeout: timedelta | float | None) -> timedelta | None:
    if is_number(timeout) and 0 < timeout <= timedelta.max.total_seconds():
        return timedelta(seconds=timeout)
    if timeout is None or (isinstance(timeout, timedelta) and timeout > timedelta()):
        return timeout
    raise ConfigurationError(
        f"timeout={timeout!r} is not a positive duration",
        remedy="give a number of seconds, a datetime.timedelta such as timedelta(minutes=10), or None",
    )

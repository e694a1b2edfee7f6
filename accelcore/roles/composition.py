"""Six roles that make up what one device can do, before anything is trained on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from accelcore.capabilities import Capabilities
from accelcore.errors import ConfigurationError
from accelcore.launchers import Launch, read_launch
from accelcore.probe import Probe

if TYPE_CHECKING:
    import torch

    from accelcore.roles.collectives import Collectives
    from accelcore.roles.compiler import Compiler
    from accelcore.roles.optimizers import Optimizers
    from accelcore.roles.precision import Precision
    from accelcore.roles.runtime import Runtime
    from accelcore.roles.scaler import Scalers

__all__ = ["Roles"]


@dataclass(frozen=True, repr=False)
class Roles:
    """What one device can do. Made by `accelcore.select()`; several may live in one process.

    Those of one kind of device share the vendor's runtime, and with it what that keeps for the whole process. Creating
    one may set some of it, such as the current device or how operators are compiled: the plugin's README says what.

    Attributes:
        name, index: what was selected, `"cuda"` and `1` for `cuda:1`.
        emulated: whether the device is imitated on the host: right in semantics, no proof of speed or numerics.
        capabilities: what it declares, which is what may be asked of it.
        precision, scaler, optimizers, collectives, compiler, runtime: the six roles.
        passed_over: what `auto` or a preference list could not use before this one, and why.
    """

    name: str
    index: int
    emulated: bool
    capabilities: Capabilities
    precision: Precision
    scaler: Scalers
    optimizers: Optimizers
    collectives: Collectives
    compiler: Compiler
    runtime: Runtime
    passed_over: tuple[Probe, ...] = ()

    def __repr__(self) -> str:
        kind = " (emulated)" if self.emulated else ""
        return f"<{type(self).__name__} {self.name}:{self.index}{kind}>"

    @property
    def device(self) -> torch.device:
        """The device, for `model.to(accel.device)` and the like."""
        return self.runtime.device

    def autocast(
        self, dtype: torch.dtype | str | None = None, *, enabled: bool = True, table: str = "torch"
    ) -> AbstractContextManager[object]:
        """Mixed precision for a forward pass; see `Precision.autocast`.

        `dtype` may be a word for it, `"bf16"`; `"best"` is the fastest that is declared here, and does nothing where
        that is fp32.
        """
        from accelcore.training.policy import autocast_dtype

        if dtype is not None:
            dtype = autocast_dtype(dtype, self)
            if dtype is None:
                return nullcontext()
        return self.precision.autocast(dtype, enabled=enabled, table=table)

    def loading(self) -> dict[str, Any]:
        """What a DataLoader for this device is made with, beside options of your own: `DataLoader(data, 32,
        **accel.loading())`. Batches are pinned where that makes transfers faster.
        """
        return {"pin_memory": self.capabilities.pinned_memory}

    @contextmanager
    def distributed(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        local_rank: int | None = None,
        init_method: str = "env://",
        timeout: timedelta | None = None,
    ) -> Iterator[Collectives]:
        """Join the job this process belongs to, for the length of a `with`; alone where there is none.

        Without arguments, the job that a launcher's environment variables describe. With `rank` and `world_size`, as
        in a script that spawns its own ranks, that job; `local_rank` is `rank` unless given. A process group that
        the script has formed itself is adopted, and left alone at the end.

        Args:
            init_method: where the ranks meet: `"env://"` (MASTER_ADDR, MASTER_PORT), `"tcp://host:port"`, `"file://..."`.
            timeout: how long a collective waits for the other ranks; None is torch's default.

        Yields:
            The collectives role, with `rank` and `world_size`.

        Raises:
            ConfigurationError: an argument or a variable is invalid; raised before any device is touched.
            DistributedError: the ranks could not meet; or a collective in the block failed because a rank was missing:
                which, and where it is.
        """
        if (rank is None) != (world_size is None):
            raise ConfigurationError("rank and world_size come together", remedy="give both, or neither")
        if rank is None and local_rank is not None:
            raise ConfigurationError("local_rank needs rank and world_size", remedy="give all three, or none")
        if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta()):
            raise ConfigurationError(
                f"timeout={timeout!r} is no length of time", remedy="give a datetime.timedelta(minutes=10), or None"
            )
        launch: Launch | None
        if rank is None or world_size is None:
            launch = read_launch()
        else:
            launch = Launch(rank, world_size, rank if local_rank is None else local_rank, init_method)
        self.collectives.init(launch, timeout=timeout)
        before, self.collectives.launch = self.collectives.launch, launch
        try:
            yield self.collectives
            # Rank 0 holds the store the others talk to: it must not leave while they still work.
            self.collectives.leave()
        except BaseException as error:
            explained = self.collectives.explain(error)
            if explained is None:
                raise
            raise explained from error
        finally:
            self.collectives.launch = before
            self.collectives.close()

    def join(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        local_rank: int | None = None,
        init_method: str = "env://",
        timeout: timedelta | None = None,
    ) -> Collectives:
        """As `distributed`, for the rest of the process: `job = accel.join()`, in a script that lives at module level.

        The job is left when the interpreter exits: at once where an error ended the script, else when the other ranks
        are there, too, or after a minute.
        """
        from accelcore.roles.joining import join

        job = self.distributed(
            rank=rank, world_size=world_size, local_rank=local_rank, init_method=init_method, timeout=timeout
        )
        return join(job)

"""Job: the ranks that train together, and what a script asks of them. Nothing is pickled."""

from __future__ import annotations

import atexit
import builtins
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from datetime import timedelta
from functools import partial
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from accelcore.errors import ConfigurationError, DistributedError, logger
from accelcore.jobs.collectives import Collectives, Op
from accelcore.jobs.exchange import exchange, gather, gather_objects, tensor_kind
from accelcore.jobs.launchers import Launch, read_launch
from accelcore.jobs.missing_ranks import MissingRanks
from accelcore.util.text import kind_of

Number = TypeVar("Number", float, Tensor)

_EXIT_TIMEOUT = timedelta(minutes=1)
"""Time that a rank waits for the others at exit: they may wait for it in a collective, or have left no trace."""


class Job:
    """Words for scripts about the ranks of a job. Without a job, this process is rank 0 of 1.

    After the block of `with accel.distributed() as job:` the job keeps its numbers: `job.is_main` is true on one rank
    only. Every exchange then raises DistributedError.

    Before ranks exchange tensors, they compare the call and the tensors' shapes and dtypes, and raise DistributedError
    on every rank if these differ: torch would abort the process, or hang. This is one more exchange between the hosts
    in each call. `accel.collectives` has the same operations without it, for loops that communicate in each step.

    Example:
        >>> with accel.distributed() as job:
        ...     mean = job.mean(torch.tensor([1.0, 3.0]))  # over the ranks
        ...     rows = job.gather(torch.ones(2, 4))  # of all ranks
        ...     job.print(mean.tolist(), tuple(rows.shape))
        [1.0, 3.0] (2, 4)

    Args:
        collectives: the backend's role, which communicates.
        launch: this process's place in the job; None if no launcher started it.
        missing: names a rank that was lost; None if the script formed the process group.

    Attributes:
        rank: this process's rank.
        world_size: the number of ranks.
    """

    def __init__(
        self, collectives: Collectives, launch: Launch | None = None, missing: MissingRanks | None = None
    ) -> None:
        self._joined, self._launch, self._missing = collectives, launch, missing
        self.rank, self.world_size = collectives.rank, collectives.world_size

    @property
    def _collectives(self) -> Collectives:
        if self._joined.world_size != self.world_size:
            raise DistributedError(
                f"this job of {self.world_size} ranks was left, and its ranks no longer exchange anything",
                remedy="make this call inside of `with accel.distributed() as job:`",
            )
        return self._joined

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes and prints for the whole job."""
        return self.rank == 0

    @property
    def local_rank(self) -> int:
        """This process's number on its host.

        Raises:
            DistributedError: the launcher does not tell it.
        """
        local_rank = self._local_rank()
        if local_rank is None:
            raise DistributedError(
                "this rank's number on its host is not known",
                why="LOCAL_RANK is not set, and the job may span hosts",
                remedy="set LOCAL_RANK, or call accel.distributed(rank=..., world_size=..., local_rank=...)",
            )
        return local_rank

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        """Combine `tensor` over all ranks in place, and return it; see `Collectives.all_reduce`."""
        exchange(self._collectives, f"all_reduce {op} of {tensor_kind(tensor)}")
        return self._collectives.all_reduce(tensor, op)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite `tensor` with that of rank `src` in place, and return it."""
        exchange(self._collectives, f"broadcast from rank {src} of {tensor_kind(tensor)}")
        return self._collectives.broadcast(tensor, src)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        exchange(self._collectives, "barrier")
        self._collectives.barrier()

    def cpu_group(self) -> dist.ProcessGroup | None:
        """Return the process group for CPU tensors; None without a job."""
        return self._joined.cpu_group()

    def print(self, *values: Any, **options: Any) -> None:
        """Call Python's `print` on the main rank only."""
        if self.is_main:
            builtins.print(*values, **options)  # noqa: T201  # this method's purpose

    @contextmanager
    def first(self) -> Iterator[None]:
        """Let one rank of each host go first, and the others when it is done: `with job.first(): download()`.

        The other ranks must then find what the first one left. If ranks do not know their number on their host, the
        main rank goes before all others. Ranks wait at most the job's `timeout`.
        """
        collectives, local_rank = self._collectives, self._local_rank()
        goes_first = (self.rank if local_rank is None else local_rank) == 0
        if not goes_first:
            collectives.barrier()
        try:
            yield
        finally:  # after an error, too: the other ranks try for themselves
            if goes_first:
                collectives.barrier()

    def gather(self, rows: Tensor | Sequence[Tensor]) -> Tensor:
        """Concatenate the rows of all ranks, in the order of ranks, and return them on every rank.

        Ranks may have different numbers of rows, or none. Gradients do not flow through.

        Args:
            rows: a tensor of any dtype, on the device or the CPU; a scalar is one row. Or a list of such tensors, one
                for each batch, which are concatenated; the list is empty on a rank without batches.

        Raises:
            ConfigurationError: on every rank, if rows differ in dtype, shape or type of device, or if all lists are
                empty; on a rank that gave something else.
        """
        return gather(self._collectives, rows)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, in the order of ranks, on every rank. Tensors in them are on the CPU.

        Args:
            value: what a checkpoint can hold: a plain value, a tensor, or lists, tuples and dicts of these. Nothing is
                pickled.

        Raises:
            ConfigurationError: on a rank that gave something else.
        """
        return gather_objects(self._collectives, value)

    def mean(self, value: Number) -> Number:
        """Return the mean over ranks of a number, or of a tensor element by element; `value` is not changed.

        Each rank has the same weight. If ranks have seen different numbers of rows, `gather` the values of all rows.
        """
        if not isinstance(value, Tensor | Real):
            raise ConfigurationError(
                f"job.mean was given {kind_of(value)}", remedy="give a number, or torch.tensor(values)"
            )
        if not isinstance(value, Tensor):
            return float(self.mean(torch.tensor(value, dtype=torch.float64, device="cpu")).item())
        if value.is_complex():
            return torch.view_as_complex(self.mean(torch.view_as_real(value.detach().resolve_conj())))
        group = self._collectives.cpu_group()
        dtype = value.dtype if value.is_floating_point() else torch.float32
        own = value.detach().to(dtype, copy=True)
        if group is None:
            return own
        exchange(self._collectives, f"mean of {tensor_kind(own)}")
        if own.device.type != "cpu":
            return self._collectives.all_reduce(own, "avg")
        total = own.double().contiguous()  # the layouts of ranks may differ
        dist.all_reduce(total, group=group)
        return (total / self.world_size).to(dtype)

    def explain(self, error: BaseException) -> DistributedError | None:
        """If a lost rank caused `error`, return an error that names the rank, and tell the other ranks.

        Only the first call does anything; later ones return None.
        """
        return None if self._missing is None else self._missing.explain(error)

    def _local_rank(self) -> int | None:
        if self.world_size == 1:
            return 0
        launch = self._launch or read_launch()
        return None if launch is None else launch.local_rank


@contextmanager
def membership(collectives: Collectives, launch: Launch | None, timeout: timedelta | None) -> Iterator[Job]:
    """Join the process group that `launch` describes, and yield the job: the context of `accel.distributed()`."""
    had_group = dist.is_initialized()
    collectives.init(launch, timeout=timeout)
    missing: MissingRanks | None = None
    job: Job | None = None
    try:
        if not had_group and collectives.world_size > 1 and dist.is_initialized():
            missing = MissingRanks(collectives, timeout or dist.default_pg_timeout)
            collectives.ahead = missing.ahead
        job = Job(collectives, launch, missing)
        yield job
        # Rank 0 holds the store that all ranks talk to: it must not leave while others still work.
        if missing is not None:
            missing.leave()
        collectives.barrier()
    except BaseException as error:
        explained = None if job is None else job.explain(error)
        if explained is None:
            raise
        raise explained from error
    finally:
        if missing is not None:
            missing.close()
            collectives.ahead = str
        collectives.close()


class NotJoined(AbstractContextManager[Job], ContextDecorator):
    """Context of a job, which `accel.distributed()` returns, and a script may take for the job.

    It also decorates a function that is a job, as other contexts of generators do: each call enters a new context.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Job]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[Job]] = []

    def __enter__(self) -> Job:
        context = self._make()
        job = context.__enter__()
        self._entered.append(context)
        return job

    def __exit__(self, *error: Any) -> bool | None:  # noqa: PYI036  # they are passed on
        return self._entered.pop().__exit__(*error)

    if not TYPE_CHECKING:  # for a type checker, the class would have every attribute

        def __getattr__(self, name: str) -> Any:
            remedy = f"`with accel.distributed() as job:` or `job = accel.join()`, and job.{name}"
            raise AttributeError(f"accel.distributed() is not a job, and has no attribute {name!r}: write {remedy}")


def join(membership: AbstractContextManager[Job]) -> Job:
    """Enter a job now, and leave it when the interpreter exits."""
    job = membership.__enter__()
    if job._missing is not None:
        job._missing.timeout = min(job._missing.timeout, _EXIT_TIMEOUT)
    atexit.register(_leave_at_exit, membership)
    sys.excepthook = partial(_show, job, sys.excepthook)
    return job


def _show(
    job: Job, show: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Show an error that ends the script; if a lost rank caused it, only the message: a traceback shows who waited."""
    explained = job.explain(error)  # without a cause, which would be shown, too
    if explained is None:
        show(kind, error, trace)
    else:
        show(type(explained), explained, None)


def _leave_at_exit(membership: AbstractContextManager[Job]) -> None:
    # Python stores here the error that ended the script. After an error, other ranks are not waited for.
    failure: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    try:
        membership.__exit__(None if failure is None else type(failure), failure, None)
    except BaseException as error:  # noqa: BLE001  # nobody is left to handle it
        if failure is None:
            error.__cause__ = None  # only the message: a traceback shows who waited
            try:
                sys.excepthook(type(error), error.with_traceback(None), None)
            finally:
                sys.stderr = cast("TextIO", _Unflushed(sys.stderr))
            return
        if error is not failure:
            logger.error("an error occurred while leaving the job: %s", error)


class _Unflushed:
    """Standard error that raises when Python flushes it at the end, so that the process ends with 120 in place of 0.

    Python documents this code for an error in cleaning up. An error of a function of `atexit` does not change the code,
    and `os._exit` would lose what open files have not written, and leave child processes.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream  # None without a console

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        raise OSError("the job was left by an error")

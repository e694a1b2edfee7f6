"""What a script asks of its place in a job, in terms of the few operations that a backend has."""

from __future__ import annotations

import builtins
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from accelcore.errors import ConfigurationError, DistributedError
from accelcore.launchers import Launch, read_launch
from accelcore.roles.rows import as_rows, empty_rows, kind_of_rows, nothing

__all__ = ["Op", "Ranks"]

Op = Literal["sum", "avg", "min", "max"]
Number = TypeVar("Number", float, Tensor)

_NONE, _REFUSED = -1, -2
"""What a rank tells of the kind of its rows where it has none, or something else."""


class Ranks(ABC):
    """A process among those of its job; alone it is the main one, and has what it gives.

    Attributes:
        launch: the place in the job that `accel.distributed(...)` was given or has read; None alone.
    """

    launch: Launch | None = None

    @property
    @abstractmethod
    def rank(self) -> int: ...

    @property
    @abstractmethod
    def world_size(self) -> int: ...

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor: ...

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor: ...

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def cpu_group(self) -> dist.ProcessGroup | None: ...

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes and prints what is needed once a job."""
        return self.rank == 0

    @property
    def local_rank(self) -> int:
        """This process's number on its host, 0 alone.

        Raises:
            DistributedError: the launcher does not tell.
        """
        local_rank = self._local_rank()
        if local_rank is None:
            raise DistributedError(
                "this rank's number on its host is not known",
                why="LOCAL_RANK is not set, and the job may span hosts",
                remedy="set LOCAL_RANK, or say accel.distributed(rank=..., world_size=..., local_rank=...)",
            )
        return local_rank

    def print(self, *values: Any, **options: Any) -> None:
        """Python's `print`, on the main rank only."""
        if self.is_main:
            builtins.print(*values, **options)  # noqa: T201  # it is what was asked for

    @contextmanager
    def first(self) -> Iterator[None]:
        """Let one rank of each host go first, and the others when it is done: `with job.first(): download()`.

        What each does must find what is there already. On a host whose ranks do not know their numbers there, the main
        rank goes before all others. They wait as long as the job's `timeout` lets a collective wait.
        """
        local_rank = self._local_rank()
        goes_first = (self.rank if local_rank is None else local_rank) == 0
        if not goes_first:
            self.barrier()
        try:
            yield
        finally:  # also where it failed: the others try for themselves
            if goes_first:
                self.barrier()

    def gather(self, rows: Tensor | Sequence[Tensor]) -> Tensor:
        """The rows of all ranks, one rank's below the other's, on every rank.

        Ranks may have different numbers of rows, or none. Gradients do not flow through it.

        Args:
            rows: of any dtype, on the device or the CPU; a scalar is one row. Or a list of such tensors, one for each
                batch, whose rows are put together; empty on a rank that had no batch.

        Raises:
            ConfigurationError: on every rank, where the rows are of different dtypes, shapes or kinds of device, where
                one gave something else, or where all lists are empty.
        """
        own, refused = as_rows(rows)
        group = self.cpu_group()
        if group is None:
            if own is None:
                raise refused or nothing()
            return own
        headers = [torch.zeros(2, dtype=torch.int64) for _ in range(self.world_size)]
        kind = _REFUSED if refused else _NONE if own is None else zlib.crc32(str(kind_of_rows(own)).encode())
        dist.all_gather(headers, torch.tensor([0 if own is None else len(own), kind]), group=group)
        told = [int(header[1]) for header in headers]
        if _REFUSED in told:
            raise refused or ConfigurationError(
                f"rank {told.index(_REFUSED)} gave what cannot be gathered", remedy="look at what that rank says"
            )
        kinds = set(told) - {_NONE}
        if len(kinds) > 1:
            here = "has none" if own is None else f"gives {tuple(own.shape[1:])}, {own.dtype}, on the {own.device.type}"
            raise ConfigurationError(
                f"the ranks gather rows of different kinds; this one {here}",
                remedy="gather tensors that differ in the number of rows only",
            )
        if not kinds:
            raise nothing()
        if _NONE in told:
            own = self._as_others(own)
        assert own is not None
        parts = []
        for source, header in enumerate(headers):
            part = own.contiguous() if source == self.rank else own.new_empty((int(header[0]), *own.shape[1:]))
            if part.numel():
                self._send(part.reshape(-1).view(torch.uint8), source)  # as bytes: any dtype can be sent so
            parts.append(part)
        return torch.cat(parts)

    def gather_objects(self, value: Any) -> list[Any]:
        """The objects of all ranks, in their order, on every rank; tensors in them come back on the CPU.

        Args:
            value: a plain value, a tensor, or lists, tuples and dicts of these: what a checkpoint can hold. Nothing is
                pickled.

        Raises:
            ConfigurationError: on every rank, where one gave something else.
        """
        from accelcore.roles.sent_objects import object_of, rows_of  # safetensors is not asked for before

        refused: ConfigurationError | None = None
        try:
            rows = rows_of(value)
        except ConfigurationError as error:  # the others wait: they have to be told
            refused, rows = error, torch.empty(0, dtype=torch.uint8)
        lengths = self.gather(torch.tensor(len(rows))).tolist()
        if 0 in lengths:
            raise refused or ConfigurationError(
                f"rank {lengths.index(0)} gave an object that cannot be sent to others",
                remedy="look at what that rank says",
            )
        return [object_of(part) for part in torch.split(self.gather(rows), lengths)]

    def mean(self, value: Number) -> Number:
        """The mean over ranks of a number, or of a tensor element by element; `value` stays as it is.

        Each rank counts alike. Where they have seen different numbers of rows, `gather` what each row has.
        """
        group = self.cpu_group()
        if not isinstance(value, Tensor):
            return float(self.mean(torch.tensor(value, dtype=torch.float64)).item())
        dtype = value.dtype if value.is_floating_point() else torch.float32
        own = value.detach().to(dtype, copy=True)
        if group is None:
            return own
        if own.device.type != "cpu":
            return self.all_reduce(own, "avg")
        total = own.double()
        dist.all_reduce(total, group=group)
        return (total / self.world_size).to(dtype)

    def _as_others(self, own: Tensor | None) -> Tensor:
        """The rows of this rank; where it has none, as many of the kind of the others'."""
        kinds = self.gather_objects(None if own is None else kind_of_rows(own))
        return empty_rows(next(kind for kind in kinds if kind is not None)) if own is None else own

    def _send(self, part: Tensor, source: int) -> None:
        if part.device.type == "cpu":
            dist.broadcast(part, source, group=self.cpu_group())
        else:
            self.broadcast(part, source)

    def _local_rank(self) -> int | None:
        if self.world_size == 1:
            return 0
        launch = self.launch or read_launch()
        return None if launch is None else launch.local_rank

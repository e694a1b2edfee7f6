"""Collectives: the process group, and the few operations data parallelism needs of it."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from accelcore.errors import DistributedError, UnsupportedError
from accelcore.launchers import Launch
from accelcore.roles.ranks import Op, Ranks
from accelcore.roles.records import Records
from accelcore.roles.reductions import OPS, check_reduction, check_source, dense, divisors, store
from accelcore.roles.whereabouts import Whereabouts

__all__ = ["Collectives", "NoCollectives", "Op", "TorchCollectives"]

_DRAIN_SECONDS = 0.1


class Collectives(Ranks):
    """Communication between the ranks of a job; what scripts ask of it beside these operations, `Ranks` has.

    Before `init`, and in a job of one process, rank is 0, world_size is 1 and every operation is the identity: a loop
    need not ask whether it runs alone.

    Attributes:
        steps: the step that each trainer of this process is in, for messages about a missing rank.
    """

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process's rank, 0 alone."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of processes, 1 alone."""

    @abstractmethod
    def init(self, launch: Launch | None, *, timeout: timedelta | None = None) -> None:
        """Join the process group that `launch` describes; None stays alone. A group already formed is adopted.

        Raises:
            DistributedError: the ranks did not meet in time, or a group exists that does not fit.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        """Combine `tensor` over all ranks, in place, and return it: any tensor or view, of any declared dtype.

        `"avg"` takes floating-point tensors only. The average of values that the dtype holds is one, too: where the
        dtype's range is smaller than fp32's, as fp16's is, each rank divides before the values are added, and otherwise
        after it, which rounds once less.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite `tensor` with rank `src`'s, in place, and return it."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank is here."""

    @abstractmethod
    def cpu_group(self) -> dist.ProcessGroup | None:
        """The group that takes CPU tensors (sizes, positions, RNG states); None alone."""

    def leave(self) -> None:
        """Wait until every rank is done with the job.

        Raises:
            DistributedError: this rank is, and another is in a step that this one never began.
        """
        self.barrier()

    def explain(self, error: BaseException) -> DistributedError | None:
        """Which rank is missing and where it is, where `error` is that of a collective that has lost one; else None.

        The other ranks learn that this one has failed.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Leave the process group, where `init` formed it."""


class NoCollectives(Collectives):
    """The collectives of a backend without process groups: one process, for ever."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    def init(self, launch: Launch | None, *, timeout: timedelta | None = None) -> None:
        if launch is not None and launch.world_size > 1:
            raise UnsupportedError(
                f"this backend declares no process group, and the job has {launch.world_size} ranks",
                remedy="run one process, or choose another backend",
            )

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        check_reduction(tensor, op)
        return tensor

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        check_source(src, 1)
        return tensor

    def barrier(self) -> None:
        pass

    def cpu_group(self) -> dist.ProcessGroup | None:
        return None

    def close(self) -> None:
        pass


class TorchCollectives(Collectives):
    """Collectives over torch.distributed's default group.

    Args:
        device: where this rank's tensors are.
        backend: torch.distributed's backend for it, or a pair that serves the CPU too.
        host: that for CPU tensors, of which a group is formed beside one that was adopted and takes none; None where
            every group takes them.
        records: environment variables by which torch or the vendor's library keeps a record of collectives; set while
            a group that was formed here stands, where they are not. For records that cost time: `detailed`.
        detailed: the same, where TORCH_DISTRIBUTED_DEBUG is DETAIL.

    Attributes:
        device: as given.
    """

    def __init__(
        self,
        device: torch.device,
        backend: str,
        host: str | None = None,
        *,
        records: Mapping[str, str] | None = None,
        detailed: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.device = device
        self._records = Records(records, detailed)
        self._whereabouts: Whereabouts | None = None
        self._backend, self._host = backend, host
        self._host_group: dist.ProcessGroup | None = None
        self._entered: list[bool] = []  # one for each init that was not closed: whether it formed the group

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def init(self, launch: Launch | None, *, timeout: timedelta | None = None) -> None:
        forms = launch is not None and not dist.is_initialized()
        if dist.is_initialized():
            self._check_fits(launch)
        elif launch is not None:
            self._records.keep()
            try:
                dist.init_process_group(
                    self._backend,
                    init_method=launch.init_method,
                    rank=launch.rank,
                    world_size=launch.world_size,
                    timeout=timeout,
                )
            except (RuntimeError, ValueError) as error:
                self._records.put_back()
                raise DistributedError(
                    f"rank {launch.rank} of {launch.world_size} could not join the others at {launch.init_method}",
                    why=str(error).split("\n", 1)[0],
                    remedy="see that every rank was started, that the address is right and its port is free",
                ) from error
        self._entered.append(forms)
        needs_host = self._host is not None and self._host_group is None and dist.is_initialized()
        if needs_host and "cpu:" not in dist.get_backend_config():
            self._host_group = dist.new_group(backend=self._host, timeout=timeout)
        if forms and self.world_size > 1:
            store = dist.distributed_c10d._get_default_store()
            self.steps.clear()
            self._whereabouts = Whereabouts(store, self.rank, self.world_size, self.steps)
            self._timeout = timeout or dist.default_pg_timeout

    def leave(self) -> None:
        if self._whereabouts is not None and len(self._entered) == 1:
            self._whereabouts.leave(self._timeout)
        self.barrier()

    def explain(self, error: BaseException) -> DistributedError | None:
        return None if self._whereabouts is None else self._whereabouts.explain(error)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        check_reduction(tensor, op)
        if dist.is_initialized():
            sent = dense(tensor)
            # Divided here, because not every process group can.
            early, late = divisors(sent.dtype, dist.get_world_size()) if op == "avg" else (1, 1)
            if early != 1:
                sent = sent / early
            dist.all_reduce(sent, OPS[op])
            if late != 1:
                sent.div_(late)
            store(tensor, sent)
        return tensor

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        check_source(src, self.world_size)
        if dist.is_initialized():
            sent = dense(tensor)
            dist.broadcast(sent, src)
            store(tensor, sent)
        return tensor

    def barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    def cpu_group(self) -> dist.ProcessGroup | None:
        return self._host_group or (dist.group.WORLD if dist.is_initialized() else None)

    def close(self) -> None:
        if self._whereabouts is not None and len(self._entered) == 1:
            self._whereabouts.close()
            self._whereabouts = None
        if self._host_group is not None and len(self._entered) == 1:
            dist.destroy_process_group(self._host_group)
            self._host_group = None
        if self._entered and self._entered.pop() and dist.is_initialized():
            # A reduction begun in backward holds a Python object, which a thread of the group drops when it gets to
            # it; if that is while the interpreter shuts down, the process aborts (pytorch#190489). Nothing tells when
            # it was dropped, so give those threads time, once a job.
            time.sleep(_DRAIN_SECONDS)
            dist.destroy_process_group()
        if not self._entered:
            self._records.put_back()

    def _check_fits(self, launch: Launch | None) -> None:
        formed = (dist.get_rank(), dist.get_world_size())
        if launch is not None and formed != (launch.rank, launch.world_size):
            raise DistributedError(
                f"a process group exists in which this is rank {formed[0]} of {formed[1]}, "
                f"not rank {launch.rank} of {launch.world_size}",
                remedy="leave rank and world_size out to use the group that exists",
            )
        config = dist.get_backend_config()
        if f"{self.device.type}:" not in config:
            raise DistributedError(
                f"the process group that exists ({config}) cannot reduce {self.device.type} tensors",
                remedy=f"form it with backend={self._backend!r}, or let accel.distributed() form it",
            )

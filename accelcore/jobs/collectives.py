"""Contract of the role `collectives`, and its default by torch.distributed."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Literal, final
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # missing in torch's types
    DebugLevel,
    PrefixStore,
    Store,
    TCPStore,
    get_debug_level,
    rendezvous,
)

from accelcore.errors import ConfigurationError, DistributedError, UnsupportedError
from accelcore.jobs.launchers import Launch
from accelcore.torch_internals import unlocked_destruction
from accelcore.util.text import first_line, ranks

__all__ = ["Collectives", "NoCollectives", "Op", "TorchCollectives"]

Op = Literal["sum", "avg", "min", "max"]

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
"""torch's reduction for each `Op`. An average is a sum that is divided here, because not every group can average."""

_DRAIN_SECONDS = 0.1


class Collectives(ABC):
    """Communication between the ranks of a job.

    All ranks must make the same calls, with tensors of the same shape and dtype: torch compares nothing, and may abort
    the process. `Job` has the same operations with a comparison.

    Before `init`, and in a job of one process, rank is 0, world_size is 1 and every operation is the identity. So a
    training loop need not check whether there are other ranks.

    Attributes:
        steps: step and micro-batch of each trainer of this process, from 1, for messages about a missing rank. Trainers
            write to it.
        calls: how many calls this process has begun that all ranks must make, and the name of the last one.
        ahead: returns the places of the ranks that have gone further than this one, or "". The job sets it.
        waits_for_lost_ranks: whether collectives on the device wait for a lost rank without an error. If a rank fails,
            the others then abort their collectives and raise an error.
    """

    waits_for_lost_ranks = False

    def __init__(self) -> None:
        self.steps: dict[int, tuple[int, int]] = {}
        self.calls = (0, "")
        self.ahead: Callable[[], str] = str

    @final
    def count(self, call: str) -> None:
        """Note that this process begins a call that all ranks must make, for messages about a missing rank."""
        self.calls = (self.calls[0] + 1, call)  # one assignment, because another thread reads it

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process's rank."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks."""

    @abstractmethod
    def init(self, launch: Launch | None, *, timeout: timedelta | None = None) -> None:
        """Join the process group that `launch` describes; None forms none. A group that exists is used.

        Raises:
            DistributedError: the ranks did not meet in time, or a group exists that does not fit.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        """Combine `tensor` over all ranks in place, and return it. It may be a view, and of any declared dtype.

        `"avg"` takes floating-point tensors only. The average does not overflow if the values do not: ranks divide
        before they add if the dtype's range is smaller than that of fp32, such as fp16's. Otherwise they divide after
        adding, which rounds less.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite `tensor` with that of rank `src` in place, and return it."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called this."""

    @abstractmethod
    def cpu_group(self) -> dist.ProcessGroup | None:
        """Return the process group for CPU tensors; None without a job."""

    @abstractmethod
    def close(self) -> None:
        """Leave the process group if `init` formed it."""


class NoCollectives(Collectives):
    """Collectives of a backend without process groups: there is always one process."""

    rank = 0
    world_size = 1

    def init(self, launch: Launch | None, *, timeout: timedelta | None = None) -> None:
        if launch is not None and launch.world_size > 1:
            raise UnsupportedError(
                f"this backend declares no process group, and the job has {launch.world_size} ranks",
                remedy="run one process, or choose another backend",
            )

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        _check_reduction(tensor, op)
        return tensor

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        _check_source(src, 1)
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
        backend: torch.distributed's backend for the device, or a pair such as `"cpu:gloo,cuda:nccl"`.
        host: torch.distributed's backend for CPU tensors. If the script's own group does not take them, a group of
            this backend is formed. None if every group takes them.
        records: environment variables that make torch or the vendor's library record collectives. Those that the user
            has not set are set while a group that was formed here exists.
        detailed: more of these, which cost time; set only if TORCH_DISTRIBUTED_DEBUG is DETAIL.

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
        self._records, self._detailed = records or {}, detailed or {}
        self._set_records: list[str] = []
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
            self._start_records()
            try:
                dist.init_process_group(
                    self._backend,
                    store=store_of_ranks(launch, timeout),
                    rank=launch.rank,
                    world_size=launch.world_size,
                    timeout=timeout,
                )
            except BaseException as error:
                self._stop_records()
                if isinstance(error, DistributedError) or not isinstance(error, RuntimeError | ValueError):
                    raise
                raise DistributedError(
                    f"rank {launch.rank} of {launch.world_size} could not form the process group",
                    why=first_line(error),
                    remedy=f"check that {self._backend!r} works on this machine, and the links between machines",
                ) from error
        self._entered.append(forms)
        needs_host = self._host is not None and self._host_group is None and dist.is_initialized()
        if needs_host and "cpu:" not in dist.get_backend_config():
            self._host_group = dist.new_group(backend=self._host, timeout=timeout)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        _check_reduction(tensor, op)
        if dist.is_initialized():
            self.count("all_reduce")
            sent = _dense(tensor)
            least = torch.finfo(torch.float32).smallest_normal
            early = op == "avg" and torch.finfo(sent.dtype).smallest_normal > least
            if early:
                sent = sent / dist.get_world_size()
            dist.all_reduce(sent, _OPS[op])
            if op == "avg" and not early:
                sent.div_(dist.get_world_size())
            _store(tensor, sent)
        return tensor

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        _check_source(src, self.world_size)
        if dist.is_initialized():
            self.count("broadcast")
            sent = _dense(tensor)
            dist.broadcast(sent, src)
            _store(tensor, sent)
        return tensor

    def barrier(self) -> None:
        if dist.is_initialized():
            self.count("barrier")
            dist.barrier()

    def cpu_group(self) -> dist.ProcessGroup | None:
        return self._host_group or (dist.group.WORLD if dist.is_initialized() else None)

    def close(self) -> None:
        if self._host_group is not None and len(self._entered) == 1:
            with unlocked_destruction():
                dist.destroy_process_group(self._host_group)
                self._host_group = None
        if self._entered and self._entered.pop() and dist.is_initialized():
            # A reduction that began in backward holds a Python object, which a thread of the group drops later. If
            # that happens while the interpreter shuts down, the process aborts (pytorch#190489). Nothing reports when
            # the object was dropped, so wait a little, once a job.
            time.sleep(_DRAIN_SECONDS)
            with unlocked_destruction():
                dist.destroy_process_group()
        if not self._entered:
            self._stop_records()

    def _start_records(self) -> None:
        """Set the variables that turn on records of collectives; libraries read them when they form a group."""
        detailed = self._detailed if get_debug_level() == DebugLevel.DETAIL else {}
        missing = {name: text for name, text in {**self._records, **detailed}.items() if name not in os.environ}
        self._set_records = list(missing)
        os.environ.update(missing)

    def _stop_records(self) -> None:
        for name in self._set_records:
            os.environ.pop(name, None)
        self._set_records = []

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


_met: dict[tuple[str, int], tuple[Store, int]] = {}
"""The store through which this process met the other ranks, by address and rank, and how often it met them.

A second job of the process needs this store, and keys of its own: else a rank may reach a store that rank 0 is closing,
or read the addresses of the first job.
"""


def store_of_ranks(launch: Launch, timeout: timedelta | None) -> Store:
    """Return a store to which all ranks are connected; the error names the ranks that did not come in time."""
    timeout, address = timeout or dist.default_pg_timeout, _address(launch.init_method)
    store, number = _met.get((address, launch.rank), (None, 0))
    if store is None:
        store = _connect(launch, address, timeout)
    keys = {rank: f"rank {rank} is here: {number}" for rank in range(launch.world_size)}
    try:
        store.set(keys[launch.rank], "")
        store.wait(list(keys.values()), timeout)
    except RuntimeError as error:
        absent = []
        with suppress(RuntimeError):  # rank 0, which serves the store, has given up
            absent = [rank for rank, key in keys.items() if not store.check([key])]
        raise _not_joined(launch, address, absent, timeout, error) from error
    store.set_timeout(timeout)
    _met[address, launch.rank] = store, number + 1
    return PrefixStore(f"default_pg/{number}", store)


def _connect(launch: Launch, address: str, timeout: timedelta) -> Store:
    url = urlsplit(address)
    # The agent of torchrun serves the store of its ranks.
    serves = url.scheme == "tcp" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        if serves and url.hostname and url.port:
            # torch's own rendezvous waits for a number of ranks, and cannot tell which are missing.
            return TCPStore(
                url.hostname, url.port, launch.world_size, launch.rank == 0, timeout, False, multi_tenant=True
            )
        place = {"rank": launch.rank, "world_size": launch.world_size}
        store: Store = next(iter(rendezvous(launch.init_method, **place, timeout=timeout)))[0]
    except (RuntimeError, ValueError) as error:
        absent = [0] if serves and launch.rank and "timed out" in str(error) else []
        raise _not_joined(launch, address, absent, timeout, error) from error
    return store


def _address(init_method: str) -> str:
    """Return the address at which ranks meet; for `env://` it is in the environment."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if init_method != "env://" or not host or not port:
        return init_method
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _not_joined(
    launch: Launch, address: str, absent: list[int], timeout: timedelta, error: Exception
) -> DistributedError:
    late = f"did not come to {address} in {timeout.total_seconds():g} seconds"
    what = f"rank {launch.rank} of {launch.world_size} could not join the others at {address}"
    return DistributedError(
        f"{ranks(absent)} of {launch.world_size} {late}" if absent else what,
        why=first_line(error),
        remedy="check that every rank was started, that the address is right and that its port is free; if ranks need "
        "more time to start, raise accel.distributed(timeout=...)",
    )


def _check_reduction(tensor: Tensor, op: str) -> None:
    if op not in _OPS:
        raise ConfigurationError(f"there is no reduction {op!r}", available=", ".join(_OPS))
    if op == "avg" and not tensor.is_floating_point():
        raise ConfigurationError(f"the average of {tensor.dtype} tensors is not defined", remedy="use 'sum'")


def _check_source(src: int, world_size: int) -> None:
    if not 0 <= src < world_size:
        raise ConfigurationError(f"there is no rank {src}", available=f"ranks 0 to {world_size - 1}")


def _dense(tensor: Tensor) -> Tensor:
    """Return contiguous memory to communicate: groups ignore strides, and the bits of a negative or conjugate view."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _store(tensor: Tensor, sent: Tensor) -> None:
    if sent.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(sent)

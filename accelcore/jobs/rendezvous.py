"""Rendezvous of a job's ranks: the store through which they form the process group, and the ranks that are missing."""

from __future__ import annotations

import os
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]  # missing in types

from accelcore.errors import DistributedError
from accelcore.jobs.launchers import Launch
from accelcore.util.text import first_line, ranks


def meet(launch: Launch, timeout: timedelta | None) -> Store:
    """Return a store to which all ranks are connected; the error names the ranks that did not come in time."""
    timeout, address = timeout or dist.default_pg_timeout, _address(launch.init_method)
    late = f"did not come to {address} in {timeout.total_seconds():g} seconds"
    url = urlsplit(address)
    # The agent of torchrun serves the store of its ranks.
    serves = url.scheme == "tcp" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        if serves and url.hostname and url.port:
            # torch's own rendezvous waits for a number of ranks, and cannot tell which are missing.
            store = TCPStore(
                url.hostname, url.port, launch.world_size, launch.rank == 0, timeout, False, multi_tenant=True
            )
        else:
            place = {"rank": launch.rank, "world_size": launch.world_size}
            store, _, _ = next(iter(rendezvous(launch.init_method, **place, timeout=timeout)))
    except (RuntimeError, ValueError) as error:
        absent = [0] if serves and launch.rank and "timed out" in str(error) else []
        raise _not_joined(launch, address, absent, late, error) from error
    keys = {rank: f"rank {rank} is here" for rank in range(launch.world_size)}
    try:
        store.set(keys[launch.rank], "")
        store.wait(list(keys.values()), timeout)
    except RuntimeError as error:
        raise _not_joined(launch, address, _absent(store, keys), late, error) from error
    store.set_timeout(timeout)
    return PrefixStore("default_pg", store)


def _address(init_method: str) -> str:
    """Return the address at which ranks meet; for `env://` it is in the environment."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if init_method != "env://" or not host or not port:
        return init_method
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _absent(store: Store, keys: dict[int, str]) -> list[int]:
    try:
        return [rank for rank, key in keys.items() if not store.check([key])]
    except RuntimeError:  # rank 0, which serves the store, has given up
        return []


def _not_joined(launch: Launch, address: str, absent: list[int], late: str, error: Exception) -> DistributedError:
    what = f"rank {launch.rank} of {launch.world_size} could not join the others at {address}"
    return DistributedError(
        f"{ranks(absent)} of {launch.world_size} {late}" if absent else what,
        why=first_line(error),
        remedy="check that every rank was started, that the address is right and that its port is free; if ranks need "
        "more time to start, raise accel.distributed(timeout=...)",
    )

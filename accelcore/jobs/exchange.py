"""Exchange of rows and objects between ranks, which compare their calls first. Nothing is pickled."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accelcore.errors import CheckpointError, ConfigurationError, DistributedError
from accelcore.jobs.collectives import Collectives
from accelcore.torch_internals import job_store
from accelcore.util.containers import bytes_of
from accelcore.util.text import first_line, kind_of, ranks

_LETTER = 512  # bytes in which a rank describes its call to the others: enough for a tensor of torch's 64 dimensions


def gather(collectives: Collectives, rows: Tensor | Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of all ranks, in the order of ranks; see `Job.gather`."""
    own = _as_rows(rows)
    kind = None if own is None else _kind_of_rows(own)
    told = exchange(collectives, "gather", [0 if own is None else len(own), kind])
    counts, kinds = [count for count, _ in told], [kind for _, kind in told]
    known = [kind for kind in kinds if kind is not None]
    if not known:
        raise ConfigurationError(
            "there is nothing to gather: no rank has any rows",
            why="the lists of all ranks are empty, so dtype and shape are unknown",
            remedy="check that there is data to evaluate on",
        )
    if any(kind != known[0] for kind in known):
        gives = ("nothing" if kind is None else f"{kind[0]} {tuple(kind[1])} on {kind[2]}" for kind in kinds)
        raise ConfigurationError(
            "the ranks gather rows of different kinds",
            why="; ".join(f"rank {rank} gives {kind}" for rank, kind in enumerate(gives)),
            remedy="gather tensors that differ in the number of rows only",
        )
    if own is None:
        dtype, shape, device = known[0]
        own = torch.empty((0, *shape), dtype=getattr(torch, dtype), device=device)
    group = collectives.cpu_group()
    if group is None:
        return own
    parts = []
    for source, count in enumerate(counts):
        part = own if source == collectives.rank else own.new_empty((count, *own.shape[1:]))
        if part.numel():
            sent = bytes_of(part)  # because groups do not take every dtype
            if part.device.type == "cpu":
                dist.broadcast(sent, source, group=group)
            else:
                collectives.broadcast(sent, source)
        parts.append(part)
    return torch.cat(parts)


def gather_objects(collectives: Collectives, value: Any, call: str = "gather_objects") -> list[Any]:
    """Return the objects of all ranks, in the order of ranks; see `Job.gather_objects`. Errors name `call`."""
    data = _to_bytes(value)
    lengths = exchange(collectives, call, len(data))
    return [_from_bytes(part) for part in torch.split(gather(collectives, data), lengths)]


def exchange(collectives: Collectives, call: str, details: Any = None) -> list[Any]:
    """Return the details of all ranks; raise DistributedError on every rank if they do not make the same call."""
    group = collectives.cpu_group()
    if group is None:
        return [details]
    called = call if call.endswith(")") else f"job.{call.split()[0]}()"
    collectives.count("a call of the job")  # calls of different names are compared below
    wait_for_ranks(collectives, "exchange", called)
    own = torch.frombuffer(bytearray(json.dumps([call, details]).encode().ljust(_LETTER)), dtype=torch.uint8)
    letters = [torch.empty_like(own) for _ in range(collectives.world_size)]
    try:
        dist.all_gather(letters, own, group=group)
    except RuntimeError as error:
        raise not_all_came(called, first_line(error)) from error
    calls, told = zip(*(json.loads(letter.numpy().tobytes()) for letter in letters), strict=True)
    if len(set(calls)) > 1:
        usual = Counter(calls).most_common(1)[0][0]  # of equally frequent ones, that of the lowest rank
        callers = {call: ranks(rank for rank, other in enumerate(calls) if other == call) for call in calls}
        raise DistributedError(
            f"{ranks(rank for rank, call in enumerate(calls) if call != usual)} of this job made another call than the "
            "others",
            why="; ".join(f"{which}: {call}" for call, which in callers.items()),
            remedy="make the same calls on all ranks, with tensors of the same shape, dtype and type of device",
        )
    return list(told)


def wait_for_ranks(collectives: Collectives, key: str, call: str, seconds: int = 4) -> None:
    """Wait some seconds for all ranks in the job's store; raise an error if a rank will not come to `call`.

    A collective could also wait, but leaves a thread in it. When the other ranks end, this thread would write lines of
    torch's to stderr and abort the process. Only a collective notices ranks that were killed.
    """
    store, ahead = job_store("meetings"), ""
    came = store.add(key, 1)
    goal = came + -came % collectives.world_size
    for _ in range(seconds):
        end, pause = time.monotonic() + 1.0, 0.0001
        while came < goal and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            came = store.add(key, 0)
        if came >= goal:
            return
        if ahead:
            raise not_all_came(call, ahead)
        ahead = collectives.ahead()


def not_all_came(call: str, why: str) -> DistributedError:
    """Return the error for a call that some ranks did not make."""
    return DistributedError(
        f"not every rank of the job came to {call}",
        why=why,
        remedy=f"call {call} on all ranks, and not under `if job.is_main:`; let the loops of all ranks end together",
    )


def tensor_kind(tensor: Tensor) -> str:
    """Return dtype, shape and type of device of a tensor, which all ranks must have in common."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device.type}"


def _as_rows(given: Any) -> Tensor | None:
    """Return the rows of a tensor or list of tensors; None if the list is empty."""
    parts = given if isinstance(given, list | tuple) else [given]
    for part in parts:
        if not isinstance(part, Tensor):
            what = f"a list with {kind_of(part)} in it" if part is not given else kind_of(given)
            raise ConfigurationError(
                f"gather takes a tensor or a list of tensors, not {what}",
                remedy="make a tensor of it, as by torch.tensor(...); job.mean(...) averages a number over ranks; "
                "job.gather_objects(...) takes other values",
            )
    rows = [part.detach().reshape(1) if part.dim() == 0 else part.detach() for part in parts]
    kinds = {str(_kind_of_rows(part)): part for part in rows}
    if len(kinds) > 1:
        first, second, *_ = (f"{part.dtype} of shape {tuple(part.shape)}" for part in kinds.values())
        raise ConfigurationError(
            f"gather got a list with tensors of different kinds: {first}, and {second}",
            remedy="give tensors that differ in the number of rows only, and gather each kind separately",
        )
    return torch.cat(rows) if len(rows) > 1 else rows[0] if rows else None


def _kind_of_rows(rows: Tensor) -> list[Any]:
    """Return dtype, shape of a row and type of device, which all ranks must have in common."""
    return [str(rows.dtype).removeprefix("torch."), list(rows.shape[1:]), rows.device.type]


def _to_bytes(value: object) -> Tensor:
    """Encode an object as a one-dimensional uint8 tensor."""
    from safetensors.torch import save  # imported on first use, as is the codec

    from accelcore.checkpoint.codec import encode

    try:
        data, tensors = encode({"sent": value})
    except CheckpointError as error:
        raise ConfigurationError(
            "an object cannot be sent to other ranks",
            why=error.what,
            available=error.available,
            remedy="convert it to one of these types, or to text",
        ) from error
    tensors["tree"] = _as_tensor(json.dumps(data).encode())
    return _as_tensor(save(tensors))


def _from_bytes(data: Tensor) -> Any:
    from safetensors.torch import load

    from accelcore.checkpoint.codec import decode

    with torch.device("cpu"):  # safetensors would read to the default device
        tensors = load(data.numpy().tobytes())
    tree = json.loads(tensors.pop("tree").numpy().tobytes())
    return decode(tree, tensors)["sent"]


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)

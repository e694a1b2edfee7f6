"""Gather tensors and objects of all ranks over a group that takes CPU tensors. Nothing is pickled."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accelcore.errors import CheckpointError, ConfigurationError
from accelcore.jobs.collectives import Collectives
from accelcore.util.text import kind_of

__all__ = ["gather", "gather_objects"]

_EMPTY, _REFUSED = -1, -2
"""Headers of a rank whose list is empty, and of one that gave something else than tensors."""

_TREE = "tree"  # key of the object's structure; its tensors have keys that begin with "sent"


def gather(collectives: Collectives, rows: Tensor | Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of all ranks, in the order of ranks; see `Job.gather`."""
    own, refused = _as_rows(rows)
    group = collectives.cpu_group()
    if group is None:
        if own is None:
            raise refused or _no_rows()
        return own
    headers = [torch.zeros(2, dtype=torch.int64) for _ in range(collectives.world_size)]
    kind = _REFUSED if refused else _EMPTY if own is None else zlib.crc32(str(_kind_of_rows(own)).encode())
    dist.all_gather(headers, torch.tensor([0 if own is None else len(own), kind]), group=group)
    kinds = [int(header[1]) for header in headers]
    if _REFUSED in kinds:
        raise refused or _other_rank_failed(kinds.index(_REFUSED))
    if len(set(kinds) - {_EMPTY}) > 1:
        here = "has none" if own is None else f"gives {tuple(own.shape[1:])}, {own.dtype}, on the {own.device.type}"
        raise ConfigurationError(
            f"the ranks gather rows of different kinds; this one {here}",
            remedy="gather tensors that differ in the number of rows only",
        )
    if set(kinds) == {_EMPTY}:
        raise _no_rows()
    if _EMPTY in kinds:
        known = gather_objects(collectives, None if own is None else _kind_of_rows(own))
        if own is None:
            dtype, shape, device = next(each for each in known if each is not None)
            own = torch.empty((0, *shape), dtype=getattr(torch, dtype), device=device)
    assert own is not None
    parts = []
    for source, header in enumerate(headers):
        part = own.contiguous() if source == collectives.rank else own.new_empty((int(header[0]), *own.shape[1:]))
        if part.numel():
            sent = part.reshape(-1).view(torch.uint8)  # bytes, because groups do not take every dtype
            if part.device.type == "cpu":
                dist.broadcast(sent, source, group=group)
            else:
                collectives.broadcast(sent, source)
        parts.append(part)
    return torch.cat(parts)


def gather_objects(collectives: Collectives, value: Any) -> list[Any]:
    """Return the objects of all ranks, in the order of ranks; see `Job.gather_objects`."""
    refused: ConfigurationError | None = None
    try:
        data = _to_bytes(value)
    except ConfigurationError as error:  # the other ranks wait for this one: the empty tensor tells them
        refused, data = error, torch.empty(0, dtype=torch.uint8)
    lengths = gather(collectives, torch.tensor(len(data))).tolist()
    if 0 in lengths:
        raise refused or _other_rank_failed(lengths.index(0))
    return [_from_bytes(part) for part in torch.split(gather(collectives, data), lengths)]


def _as_rows(given: Any) -> tuple[Tensor | None, ConfigurationError | None]:
    """Return the rows of a tensor or list of tensors (None if the list is empty), or the error for anything else."""
    parts = given if isinstance(given, list | tuple) else [given]
    for part in parts:
        if not isinstance(part, Tensor):
            what = f"a list with {kind_of(part)} in it" if part is not given else kind_of(given)
            return None, ConfigurationError(
                f"gather takes a tensor or a list of tensors, not {what}",
                remedy="make a tensor of it, as by torch.tensor(...); job.mean(...) averages a number over ranks; "
                "job.gather_objects(...) takes other values",
            )
    rows = [part.detach().reshape(1) if part.dim() == 0 else part.detach() for part in parts]
    kinds = {str(_kind_of_rows(part)): part for part in rows}
    if len(kinds) > 1:
        first, second, *_ = (f"{part.dtype} of shape {tuple(part.shape)}" for part in kinds.values())
        return None, ConfigurationError(
            f"gather got a list with tensors of different kinds: {first}, and {second}",
            remedy="give tensors that differ in the number of rows only, and gather each kind separately",
        )
    return (torch.cat(rows) if len(rows) > 1 else rows[0] if rows else None), None


def _kind_of_rows(rows: Tensor) -> tuple[str, list[int], str]:
    """Return dtype, shape of a row and type of device, which all ranks must have in common."""
    return str(rows.dtype).removeprefix("torch."), list(rows.shape[1:]), rows.device.type


def _no_rows() -> ConfigurationError:
    return ConfigurationError(
        "there is nothing to gather: no rank has any rows",
        why="the lists of all ranks are empty, so dtype and shape are unknown",
        remedy="check that there is data to evaluate on",
    )


def _other_rank_failed(rank: int) -> ConfigurationError:
    return ConfigurationError(
        f"rank {rank} gave a value that cannot be gathered", remedy=f"see the error message of rank {rank}"
    )


def _to_bytes(value: object) -> Tensor:
    """Encode an object as a one-dimensional uint8 tensor, which is never empty."""
    from safetensors.torch import save  # imported on first use, as is the codec

    from accelcore.checkpoint.codec import encode

    try:
        data, tensors = encode({"sent": value})
    except CheckpointError as error:
        raise ConfigurationError(
            "an object cannot be sent to other ranks",
            why=error.what,
            available=error.available,
            remedy="convert it to one of those, or to text",
        ) from error
    tensors[_TREE] = _as_tensor(json.dumps(data).encode())
    return _as_tensor(save(tensors))


def _from_bytes(data: Tensor) -> Any:
    from safetensors.torch import load

    from accelcore.checkpoint.codec import decode

    tensors = load(data.numpy().tobytes())
    tree = json.loads(tensors.pop(_TREE).numpy().tobytes())
    return decode(tree, tensors)["sent"]


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)

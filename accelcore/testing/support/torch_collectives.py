"""Torch's collectives in groups of some of the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import accelcore

GROUPS = ((0, 2), (1, 2), (0, 1))  # of three ranks
OF_GROUPS = ("float32", "int64")


def in_groups(accel: accelcore.Backend, rank: int) -> dict[str, Any]:
    """Return what torch's collectives make of a rank's numbers, in each group that it is in."""
    found: dict[str, Any] = {}
    for members in GROUPS:
        group = dist.new_group(list(members))  # which all ranks have to form
        for dtype in OF_GROUPS if rank in members else ():
            mine = torch.tensor([rank + 1, 10 * rank], device=accel.device, dtype=getattr(torch, dtype))
            made: dict[str, list[Any]] = {"gathered": [torch.empty_like(mine) for _ in members], "sum": [mine.clone()]}
            dist.all_gather(made["gathered"], mine, group=group)
            dist.all_reduce(made["sum"][0], group=group)
            for one in members:
                sent, total = mine.clone(), mine.clone()
                dist.broadcast(sent, one, group=group)
                dist.reduce(total, one, group=group)
                made |= {f"broadcast from {one}": [sent], f"sum for {one}": [total] if rank == one else []}
            found[f"{members} {dtype}"] = {what: [each.tolist() for each in parts] for what, parts in made.items()}
    return found

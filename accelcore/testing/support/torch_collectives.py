"""torch's collectives that scripts call themselves: what two ranks get by each, and three ranks in groups of two."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import accelcore

GROUPS = ((0, 2), (1, 2), (0, 1))  # of three ranks
OF_GROUPS = ("float32", "int64")
_SENT = ((1, 2), (3, 1))  # rows of each rank to each rank

_Call = Callable[[int, Callable[[int, int], Tensor]], Tensor]


def _all_to_all(rank: int, rows: Callable[[int, int], Tensor]) -> Tensor:
    found = torch.full_like(rows(rank, 4), -1.0)
    dist.all_to_all_single(found, rows(rank, 4))
    return found


def _of_unequal_parts(rank: int, rows: Callable[[int, int], Tensor]) -> Tensor:
    sent, received = list(_SENT[rank]), [each[rank] for each in _SENT]
    found = torch.full_like(rows(rank, sum(received)), -1.0)
    dist.all_to_all_single(found, rows(rank, sum(sent)), received, sent)
    return found


def _of_lists(rank: int, rows: Callable[[int, int], Tensor]) -> Tensor:
    found = [torch.full_like(rows(0, each[rank]), -1.0) for each in _SENT]
    dist.all_to_all(found, list(rows(rank, sum(_SENT[rank])).split(list(_SENT[rank]))))
    return torch.cat(found)


def _all_gather(rank: int, rows: Callable[[int, int], Tensor]) -> Tensor:
    found = torch.full_like(rows(rank, 6), -1.0)
    dist.all_gather_into_tensor(found, rows(rank, 3))
    return found


def _reduce_scatter(rank: int, rows: Callable[[int, int], Tensor]) -> Tensor:
    found = torch.full_like(rows(rank, 2), -1.0)
    dist.reduce_scatter_tensor(found, rows(rank, 4))
    return found


def _reduce(rank: int, rows: Callable[[int, int], Tensor]) -> Tensor:
    found = rows(rank, 3)
    dist.reduce(found, 1)
    return found[: 3 * rank]  # those of the other rank are not defined


def _scatter(rank: int, rows: Callable[[int, int], Tensor]) -> Tensor:
    found = torch.full_like(rows(rank, 2), -1.0)
    dist.scatter(found, list(rows(1, 4).split(2)) if rank else None, 1)
    return found


def _gather(rank: int, rows: Callable[[int, int], Tensor]) -> Tensor:
    found = [torch.full_like(rows(rank, 3), -1.0) for _ in range(2)]
    dist.gather(rows(rank, 3), found if rank else None, 1)
    return torch.cat(found)[: 6 * rank]


def _exchange(rank: int, rows: Callable[[int, int], Tensor]) -> Tensor:
    found = torch.full_like(rows(0, 3 - rank), -1.0)  # rank 0 sends 2 rows and gets 3
    given = dist.P2POp(dist.isend, rows(rank, 2 + rank), 1 - rank)
    for work in dist.batch_isend_irecv([given, dist.P2POp(dist.irecv, found, 1 - rank)]):
        work.wait()
    return found


def _both(count: int) -> list[int]:
    return [*range(count), *range(100, 100 + count)]


CALLS: dict[str, tuple[_Call, tuple[list[int], list[int]]]] = {
    "all_to_all_single": (_all_to_all, ([0, 1, 100, 101], [2, 3, 102, 103])),
    "all_to_all_single of unequal parts": (_of_unequal_parts, ([0, 100, 101, 102], [1, 2, 103])),
    "all_to_all of unequal parts": (_of_lists, ([0, 100, 101, 102], [1, 2, 103])),
    "all_gather_into_tensor": (_all_gather, (_both(3), _both(3))),
    "reduce_scatter_tensor": (_reduce_scatter, ([100, 102], [104, 106])),
    "reduce": (_reduce, ([], [100, 102, 104])),
    "scatter": (_scatter, ([100, 101], [102, 103])),
    "gather": (_gather, ([], _both(3))),
    "batch_isend_irecv": (_exchange, ([100, 101, 102], [0, 1])),
}
"""Calls by name, of a rank and its rows, and the first numbers of the rows that each rank gets."""


def called(device: torch.device, rank: int) -> dict[str, list[list[float]] | str]:
    """Return what a rank gets by each call: rows of two numbers, or the error with which torch refuses it."""

    def rows(of: int, count: int) -> Tensor:
        numbers = torch.arange(100.0 * of, 100.0 * of + count, device=device)
        return torch.stack([numbers, -numbers], 1)

    found: dict[str, list[list[float]] | str] = {}
    for name, (call, _) in CALLS.items():
        try:
            with warnings.catch_warnings():  # a backend may warn that it gathers by all_gather
                warnings.simplefilter("ignore")
                found[name] = call(rank, rows).tolist()
        except (RuntimeError, NotImplementedError, ValueError) as error:
            found[name] = f"{name}: {error}"
    return found


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

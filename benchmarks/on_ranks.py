"""Measuring on the ranks of a job: processes of one thread each, which meet over gloo on this host."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

import accelcore
from benchmarks.report import Table

__all__ = ["Measure", "on_ranks"]

Measure = Callable[..., Iterator[Table]]
"""`measure(accel, rank, *arguments)` makes the same tables on every rank, of which rank 0's count."""


def on_ranks(size: int, measure: Measure, *arguments: Any) -> Iterator[Table]:
    """The tables of rank 0, as they are made.

    Args:
        size: how many ranks.
        measure: called on every rank; has to be a function that can be pickled.
        arguments: of `measure`.

    Raises:
        RuntimeError: a rank has failed, and said why by itself.
    """
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        found, sent = context.Pipe(duplex=False)
        place = (size, f"file://{folder}/ranks", sent)
        ranks = [
            context.Process(target=_rank, args=(rank, *place, measure, arguments), daemon=True) for rank in range(size)
        ]
        for process in ranks:
            process.start()
        sent.close()  # so that the end of all ranks is the end of what they send
        try:
            while (table := found.recv()) is not None:
                yield table
        except EOFError:
            raise RuntimeError("a rank has failed; its error is above") from None
        finally:
            for process in ranks:
                process.join(timeout=60)


def _rank(rank: int, size: int, meeting: str, found: Connection, measure: Measure, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    accel = accelcore.select("cpu")
    with accel.distributed(rank=rank, world_size=size, init_method=meeting):
        for table in measure(accel, rank, *arguments):
            assert torch.get_num_threads() == 1, "somebody has changed the number of threads"
            if rank == 0:
                found.send(table)
    if rank == 0:
        found.send(None)
    found.close()

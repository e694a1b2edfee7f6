"""Giving runs their gradients before a step, and dividing those of which only a part has one."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from itertools import chain

from torch import Tensor

from accelcore.optim.memory import Run
from accelcore.optim.slot_state import Entry, divide

__all__ = ["present"]


def present(runs: Sequence[Run], state: MutableMapping[Tensor, Entry]) -> list[Run] | None:
    """Give each run that is a stretch of flat memory its gradient, or none.

    Returns:
        None where that could be done; else the runs as they have to be divided, their state divided with them, because
        only some of a run's parameters received a gradient.
    """
    mixed = False
    for run in runs:
        if run.memory is None:
            continue
        received = run.received
        if all(received):
            if run.value.grad is not run.gradient:
                run.value.grad = run.gradient
        elif not any(received):
            run.value.grad = None
        else:
            mixed = True
    return list(chain.from_iterable(_divided(run, state) for run in runs)) if mixed else None


def _divided(run: Run, state: MutableMapping[Tensor, Entry]) -> list[Run]:
    received = run.received
    edges = [run.first + n for n in range(1, len(received)) if received[n] != received[n - 1]]
    if not edges:
        return [run]
    parts = run.split(edges)
    divide(run, parts, state)
    return parts

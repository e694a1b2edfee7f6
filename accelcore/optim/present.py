"""Giving runs their gradients before a step, and dividing those of which only a part has one, or other options."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from itertools import chain

from torch import Tensor

from accelcore.optim.runs import Run
from accelcore.optim.slot_state import Entry, divide

__all__ = ["by_group", "present"]


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
    return _divided(runs, state, lambda run: run.received) if mixed else None


def by_group(runs: Sequence[Run], state: MutableMapping[Tensor, Entry]) -> list[Run]:
    """Runs of one group each, their state divided with them."""
    return _divided(runs, state, lambda run: [slot.group for slot in run.slots])


def _divided(
    runs: Sequence[Run], state: MutableMapping[Tensor, Entry], trait: Callable[[Run], Sequence[int]]
) -> list[Run]:
    """The runs, divided where the trait of a slot differs from that of the one before it."""
    return list(chain.from_iterable(_parts(run, trait(run), state) for run in runs))


def _parts(run: Run, traits: Sequence[int], state: MutableMapping[Tensor, Entry]) -> list[Run]:
    edges = [run.first + n for n in range(1, len(traits)) if traits[n] != traits[n - 1]]
    if not edges:
        return [run]
    parts = run.split(edges)
    divide(run, parts, state)
    return parts

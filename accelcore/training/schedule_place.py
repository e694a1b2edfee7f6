"""Where a scheduler stands: looked at between its steps, it tells whether somebody else has stepped it."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Place", "Places"]


class Place(NamedTuple):
    """Where a scheduler stood at some moment.

    Attributes:
        steps: how often it has been stepped; None where it does not count as torch's do, and nothing can be told.
        rates: the list of the rates it began with, which loading a state replaces, and a step does not.
    """

    steps: int | None
    rates: Any

    def is_stepped_to(self, now: Place) -> bool:
        """Whether steps have led from here to `now`, and not a state that was loaded."""
        if self.steps is None or now.steps is None or self.rates is not now.rates:
            return False
        return self.steps < now.steps

    def is_still(self, now: Place) -> bool:
        """Whether the scheduler was neither stepped nor loaded between here and `now`."""
        return self.steps == now.steps and self.rates is now.rates


class Places:
    """Looks where a scheduler stands."""

    def __init__(self, scheduler: Any) -> None:
        self._counts, self._begins = _holder(scheduler, "last_epoch"), _holder(scheduler, "base_lrs")

    def now(self) -> Place:
        """Where it stands now."""
        return Place(getattr(self._counts, "last_epoch", None), getattr(self._begins, "base_lrs", None))


def _holder(scheduler: Any, name: str) -> Any:
    """The scheduler that has an attribute: itself, or the first of those it is made of, as torch's ChainedScheduler."""
    within = getattr(scheduler, "_schedulers", None)
    return _holder(within[0], name) if within and not hasattr(scheduler, name) else scheduler

"""What an optimizer is bound to: the runs that its engine updates, made right before each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, optim

from accelcore.errors import TrainingError
from accelcore.optim.groups import alike
from accelcore.optim.runs import Run
from accelcore.optim.slot_state import Entry, by_parameter, divide, pour

__all__ = ["Binding"]

Groups = Sequence[dict[str, Any]]


class Binding:
    """The runs that an engine updates, and their state, which is seen and loaded by parameter.

    A run is divided, and its state with it, where its parameters part: when only some of them receive a gradient, or
    when the options of their groups are no longer equal.

    Args:
        engine: computes the updates.
        runs: what it trains.
        groups: the optimizer's own, which hold the model's parameters.
        entries: the state to begin with, by parameter.

    Attributes:
        runs: as they are divided now.
    """

    def __init__(
        self, engine: optim.Optimizer, runs: Sequence[Run], groups: Groups, entries: Mapping[Tensor, Entry]
    ) -> None:
        self._engine, self.runs = engine, runs
        self._sizes = [len(group["params"]) for group in groups]
        self._pour(entries)

    def state(self) -> dict[Tensor, Entry]:
        """The state by parameter, also of those that are not trained now, such as frozen ones."""
        return by_parameter(self.runs, self._engine.state) | self._not_trained

    def load(self, entries: Mapping[Tensor, Entry]) -> None:
        """Have this state, by parameter, in place of what there is."""
        self._engine.state.clear()
        self._pour(entries)

    def follow(self, groups: Groups) -> None:
        """Give the engine the options of the optimizer's groups, as they are now.

        Raises:
            TrainingError: parameters were added to them.
        """
        if [len(group["params"]) for group in groups] != self._sizes:
            raise TrainingError(
                "parameters were added to the optimizer since it was bound", remedy="let the trainer that bound it step"
            )
        for group, engine_group in zip(groups, self._engine.param_groups, strict=True):
            values = engine_group["params"]
            engine_group.update(group)
            engine_group["params"] = values
        if self._spanning:
            firsts = alike(groups)
            if any(firsts[number] != firsts[run.group] for run in self._spanning for number in run.groups):
                self._divide(lambda run: [slot.group for slot in run.slots])

    def present(self) -> None:
        """Give each stretch of flat memory its gradient, or none; divide those of which only a part has one."""
        mixed = False
        for run in self._stretches:
            received = run.received
            if all(received):
                if run.value.grad is not run.gradient:
                    run.value.grad = run.gradient
            elif not any(received):
                run.value.grad = None
            else:
                mixed = True
        if mixed:
            self._divide(lambda run: run.received)
            self.present()

    def _pour(self, entries: Mapping[Tensor, Entry]) -> None:
        self.runs = pour(entries, self.runs, self._engine)
        trained = {slot.parameter for run in self.runs for slot in run.slots}
        self._not_trained = {parameter: entry for parameter, entry in entries.items() if parameter not in trained}
        self._place()

    def _divide(self, trait: Callable[[Run], Sequence[int]]) -> None:
        """Divide each run where the trait of a slot differs from that of the one before it."""
        self.runs = list(chain.from_iterable(self._parts(run, trait(run)) for run in self.runs))
        self._place()

    def _parts(self, run: Run, traits: Sequence[int]) -> list[Run]:
        edges = [run.first + n for n in range(1, len(traits)) if traits[n] != traits[n - 1]]
        if not edges:
            return [run]
        parts = run.split(edges)
        divide(run, parts, self._engine.state)
        return parts

    def _place(self) -> None:
        """Give the engine's groups the runs, as they are now."""
        self._stretches = [run for run in self.runs if run.memory is not None]
        self._spanning = [run for run in self.runs if len(run.groups) > 1]
        for number, group in enumerate(self._engine.param_groups):
            group["params"] = [run.value for run in self.runs if run.group == number]
        place = getattr(self._engine, "place_runs", None)
        if place is not None:
            place(self.runs)

"""Bindings of a `RoutedOptimizer`: to the runs of a trainer, or to the parameters in its own groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, optim
from torch.autograd.graph import increment_version

from accelcore.errors import TrainingError
from accelcore.optim.engine import as_engine, equal_groups
from accelcore.optim.flat.memory import FlatMemory, Run, Slot, lay_flat
from accelcore.optim.formulas import FORMULAS
from accelcore.optim.state import Entry, by_parameter, divide, load_state

Groups = Sequence[dict[str, Any]]


class RunBinding:
    """Binding to the runs of a trainer, which sets their gradients before each step.

    A run and its state are divided if only some of its parameters receive a gradient, or if the options of their groups
    differ. `groups` are the optimizer's own, which hold the model's parameters. `entries` are the state to begin with,
    by parameter.
    """

    def __init__(
        self, implementation: optim.Optimizer, runs: Sequence[Run], groups: Groups, entries: Mapping[Tensor, Entry]
    ) -> None:
        self._implementation, self.runs = implementation, runs
        self._place_runs = as_engine(implementation).place_runs
        self._sizes = [len(group["params"]) for group in groups]
        self.on_leaves = any(run.value.requires_grad for run in runs)  # updates then need `torch.no_grad()`
        self.is_due = True  # whether `step` may be called now; a trainer sets it, and what updates by itself
        self.updated_by = ""  # the trainer's last call, if that updates
        self.load_state(entries)

    @property
    def state(self) -> dict[Tensor, Entry]:
        return by_parameter(self.runs, self._implementation.state) | self._not_trained

    def load_state(self, entries: Mapping[Tensor, Entry]) -> None:
        self._implementation.state.clear()
        self.runs = load_state(entries, self.runs, self._implementation)
        trained = {slot.parameter for run in self.runs for slot in run.slots}
        self._not_trained = {parameter: entry for parameter, entry in entries.items() if parameter not in trained}
        self._place()

    def prepare(self, groups: Groups) -> None:
        """Give the implementation the current options and gradients. Called before each update."""
        if not self.is_due:
            raise TrainingError(
                "optimizer.step() was called, and a trainer steps this optimizer",
                why="the trainer averages the gradients over ranks, unscales and clips them, and steps the scheduler",
                remedy=f"remove the call of optimizer.step(): {self.updated_by} updates the parameters by itself; "
                "a loss of your own needs trainer.backward(loss) and trainer.update()"
                if self.updated_by
                else "call trainer(batch), or trainer.backward(loss) and trainer.update(); or make an optimizer "
                "without a trainer",
            )
        self._refresh_options(groups)
        self._refresh_gradients()

    def increment_versions(self) -> None:
        """Let autograd see that parameters in flat memory were updated: writing to it does not."""
        if self._flat_parameters:
            increment_version(self._flat_parameters)

    def _refresh_options(self, groups: Groups) -> None:
        if [len(group["params"]) for group in groups] != self._sizes:
            raise TrainingError(
                "parameters were added to the optimizer after a trainer had bound it", remedy="let that trainer step it"
            )
        for group, own_group in zip(groups, self._implementation.param_groups, strict=True):
            values = own_group["params"]
            own_group.update(group)
            own_group["params"] = values
        if self._spanning:
            firsts = equal_groups(groups)
            if any(firsts[number] != firsts[run.group] for run in self._spanning for number in run.groups):
                self._divide(lambda run: [slot.group for slot in run.slots])

    def _refresh_gradients(self) -> None:
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
            self._refresh_gradients()

    def _divide(self, trait: Callable[[Run], Sequence[int]]) -> None:
        """Divide each run, and its state, between neighbours of which the trait differs."""
        divided = [(run, run.split_by(trait(run))) for run in self.runs]
        for run, parts in divided:
            if len(parts) > 1:
                divide(run, parts, self._implementation.state)
        self.runs = list(chain.from_iterable(parts for _, parts in divided))
        self._place()

    def _place(self) -> None:
        """Give the runs to the implementation's groups."""
        self._stretches = [run for run in self.runs if run.memory is not None]
        self._spanning = [run for run in self.runs if len(run.groups) > 1]
        self._flat_parameters = [slot.parameter for run in self._stretches for slot in run.slots]
        for number, group in enumerate(self._implementation.param_groups):
            group["params"] = [run.value for run in self.runs if run.group == number]
        self._place_runs(self.runs)


class GroupBinding:
    """Binding to the parameters in the optimizer's own groups, for a loop without a trainer.

    The state that it begins with is loaded in the first step: until then a trainer may bind the optimizer to masters,
    which are more exact. If the implementation updates `flat` memory only, that is laid out in the first step, too.
    """

    on_leaves = True

    def __init__(
        self,
        name: str,
        implementation: optim.Optimizer,
        groups: list[dict[str, Any]],
        entries: dict[Tensor, Entry],
        flat: bool,
    ) -> None:
        self._name, self._implementation, self._waiting, self._is_flat = name, implementation, entries, flat
        # Shared dictionaries, so that a changed option needs no copy.
        implementation.param_groups[:] = [dict(group) for group in groups] if flat else groups
        self._replaced, self._layouts = as_engine(implementation).replaced, _layouts(groups)
        self._memories: list[FlatMemory] = []
        self._flat: RunBinding | None = None

    @property
    def state(self) -> dict[Tensor, Any]:
        if self._flat is not None:
            return self._flat.state
        return self._implementation.state | self._waiting if self._waiting else self._implementation.state

    def is_outdated(self, groups: Groups) -> bool:
        """Return whether parameters have changed, so that the optimizer must choose its route again."""
        return self._replaced() and self._layouts != _layouts(groups)

    def prepare(self, groups: Groups) -> None:
        """Load the state that waits, and bring flat memory up to date. Called before each update."""
        if self._is_flat:
            for memory in self._memories:
                memory.refresh()
            if self._flat is None:
                self._memories = lay_flat(_slots(groups), joint_groups(self._name, groups))
                runs = list(chain.from_iterable(each.runs(each.values, each.gradients) for each in self._memories))
                self._flat = RunBinding(self._implementation, runs, groups, self.state)
                self.on_leaves = False
            for memory in self._memories:
                memory.collect()
            self._flat.prepare(groups)
        elif self._waiting:
            load_state(self._waiting, [Run([slot], slot.parameter) for slot in _slots(groups)], self._implementation)
            self._waiting = {}

    def increment_versions(self) -> None:
        """Let autograd see that parameters in flat memory were updated."""
        if self._flat is not None:
            self._flat.increment_versions()


def joint_groups(name: str, groups: Groups) -> Sequence[int]:
    """Return for each group the number of the first group with which the optimizer `name` may update it as one."""
    formula = FORMULAS.get(name)
    return range(len(groups)) if formula is None or formula.by_group else equal_groups(groups)


def _slots(groups: Groups) -> list[Slot]:
    return [
        Slot(str(number), number, parameter, parameter)
        for number, group in enumerate(groups)
        for parameter in group["params"]
    ]


def _layouts(groups: Groups) -> list[tuple[Any, ...]]:
    return [(p.dtype, p.device, p.stride()) for group in groups for p in group["params"]]

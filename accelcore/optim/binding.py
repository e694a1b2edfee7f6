"""Bindings of a `RoutedOptimizer`: to the runs of a trainer, or to the parameters in its own groups; and its state.

State is by parameter in a `state_dict`, and by run in an engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from accelcore.errors import TrainingError, logger
from accelcore.optim.engine import as_engine, equal_groups
from accelcore.optim.flat.memory import FlatMemory, Run, Slot, lay_flat
from accelcore.optim.formulas import FORMULAS
from accelcore.optim.shards import as_shard, shard_of, to_local

Groups = Sequence[dict[str, Any]]
Entry = dict[str, Any]

COUNTERS = ("step", "eta", "mu", "mu_product")
"""Scalars in the state of torch's optimizers: one for a parameter, not for each of its elements."""

SWITCHES = ("foreach", "fused", "capturable", "differentiable", "param_names", "state_dtype")
"""Options of a group that choose an implementation, not a result. They are not loaded."""


class RunBinding:
    """Binding to the runs of a trainer, which sets their gradients before each step.

    A run and its state are divided if only some of its parameters receive a gradient, or if the options of their groups
    differ. `groups` are the optimizer's own, which hold the model's parameters. `entries` are the state to begin with,
    by parameter.
    """

    def __init__(
        self, implementation: Optimizer, runs: Sequence[Run], groups: Groups, entries: Mapping[Tensor, Entry]
    ) -> None:
        self._implementation, self.runs = implementation, runs
        self._place_runs = as_engine(implementation).place_runs
        self._sizes = [len(group["params"]) for group in groups]
        self.on_leaves = any(run.value.requires_grad for run in runs)  # updates then need `torch.no_grad()`
        self.is_due = True  # whether `step` may be called now; a trainer sets this and `updated_by`
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
                "parameters were added to the optimizer after a trainer had bound it", remedy="call trainer.refresh()"
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
    which are more exact.
    """

    on_leaves = True

    def __init__(self, implementation: Optimizer, groups: list[dict[str, Any]], entries: dict[Tensor, Entry]) -> None:
        self._implementation, self._waiting = implementation, entries
        implementation.param_groups[:] = groups  # shared dictionaries, so that a changed option needs no copy
        self._replaced, self._layouts = as_engine(implementation).replaced, _layouts(groups)

    @property
    def state(self) -> dict[Tensor, Any]:
        return self._implementation.state | self._waiting if self._waiting else self._implementation.state

    def is_outdated(self, groups: Groups) -> bool:
        """Return whether parameters have changed, so that the optimizer must choose its route again."""
        return self._replaced() and self._layouts != _layouts(groups)

    def prepare(self, groups: Groups) -> None:
        """Load the state that waits. Called before each update."""
        if self._waiting:
            load_state(self._waiting, [Run([slot], slot.parameter) for slot in _slots(groups)], self._implementation)
            self._waiting = {}

    def increment_versions(self) -> None:
        """Do nothing: only updates of flat memory leave the versions of parameters as they are."""


class FlatGroupBinding(GroupBinding):
    """Binding for an implementation that updates flat memory only, which is laid out in the first step."""

    def __init__(
        self, name: str, implementation: Optimizer, groups: list[dict[str, Any]], entries: dict[Tensor, Entry]
    ) -> None:
        super().__init__(implementation, [dict(group) for group in groups], entries)
        self._name = name
        self._memories: list[FlatMemory] = []
        self._flat: RunBinding | None = None

    @property
    def state(self) -> dict[Tensor, Any]:
        return super().state if self._flat is None else self._flat.state

    def prepare(self, groups: Groups) -> None:
        """Lay flat memory out, or bring it up to date. Called before each update."""
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

    def increment_versions(self) -> None:
        assert self._flat is not None, "prepare comes first"
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


def by_parameter(runs: Iterable[Run], state: Mapping[Tensor, Entry]) -> dict[Tensor, Entry]:
    """Return the state by parameter, with torch's keys. Tensors of the parameter's shape are views."""
    entries: dict[Tensor, Entry] = {}
    for run in runs:
        entry = state.get(run.value)
        if not entry:
            continue
        columns = {key: _by_slot(run, key, value) for key, value in entry.items()}
        for number, slot in enumerate(run.slots):
            entries[slot.parameter] = {key: column[number] for key, column in columns.items()}
    return entries


def load_state(entries: Mapping[Tensor, Entry], runs: Sequence[Run], optimizer: Optimizer) -> list[Run]:
    """Load state by parameter into an optimizer. Return its runs, split between parameters with other histories."""
    engine = as_engine(optimizer)
    divided = []
    for whole in runs:
        histories = [_history(entries.get(slot.parameter, {})) for slot in whole.slots]
        for run in whole.split_by(histories):
            divided.append(run)
            if histories[run.first - whole.first]:
                group = optimizer.param_groups[run.group]
                counts_there = group.get("fused") or group.get("capturable") or engine.counts_on_device
                # The host counts unless a kernel does on the device: then the host need not wait for it.
                place = run.value.device if counts_there else torch.device("cpu")
                own = [_own(entries[slot.parameter], slot) for slot in run.slots]
                optimizer.state[run.value] = _of_run(own, run, engine.state_dtype(group, run.value), place)
    return divided


def divide(run: Run, parts: Sequence[Run], state: MutableMapping[Tensor, Entry]) -> None:
    """Divide the state of a run among its parts. Each part gets counters of its own."""
    entry = state.pop(run.value, None)
    if entry:
        for part in parts:
            state[part.value] = {
                key: (run.cut(value, part.first, part.last) if value.shape == run.value.shape else value.clone())
                if isinstance(value, Tensor)
                else value
                for key, value in entry.items()
            }


def read_state(saved: Mapping[str, Any], groups: Sequence[dict[str, Any]], *, shaped: bool) -> dict[Tensor, Entry]:
    """Return a copy of the state in a `state_dict`, by parameter of these groups; raise ValueError if it does not fit.

    If `shaped`, every tensor in it, except counters, must have the shape of its parameter.
    """
    saved_groups = saved["param_groups"]
    if [len(group["params"]) for group in saved_groups] != [len(group["params"]) for group in groups]:
        raise ValueError("the saved state and this optimizer differ in the number or sizes of their parameter groups")
    parameters = chain.from_iterable(group["params"] for group in groups)
    numbers = [(number, group) for group in saved_groups for number in group["params"]]
    entries: dict[Tensor, Entry] = {}
    for (number, group), parameter in zip(numbers, parameters, strict=True):
        if number in saved["state"]:
            entries[parameter] = _with_torchs_step(saved["state"][number], group)
            for key, value in entries[parameter].items() if shaped else ():
                if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                    shapes = f"{tuple(value.shape)}, but its parameter has {tuple(parameter.shape)}"
                    raise ValueError(f"the state {key!r} has shape {shapes}")
    if any("exp_avg" in e and not e.get("step", 1) and bool(e["exp_avg"].any()) for e in entries.values()):
        logger.warning("the saved state has moments but counts no updates: a schedule starts over")
    return entries


def _by_slot(run: Run, key: str, value: Any) -> Sequence[Any]:
    if run.memory is None and isinstance(value, Tensor) and key not in COUNTERS:
        return [as_shard(value, slot.parameter) for slot in run.slots]
    if run.memory is None or not isinstance(value, Tensor):
        return [value] * len(run.slots)
    if value.shape == run.value.shape:
        return run.parts(value)
    # A tensor each: torch increments them one by one.
    return value.expand(len(run.slots), *value.shape).clone().unbind()


def _history(entry: Entry) -> dict[str, Any]:
    """Return what parameters must have in common to be updated as one: keys and equal counters."""
    return {
        key: (value.item() if isinstance(value, Tensor) else value) if key in COUNTERS else None
        for key, value in entry.items()
    }


def _own(entry: Entry, slot: Slot) -> Entry:
    """Return a parameter's state; only this rank's shard if the parameter is divided."""
    return {
        key: shard_of(value, slot.parameter) if isinstance(value, Tensor) and key not in COUNTERS else value
        for key, value in entry.items()
    }


def _of_run(entries: Sequence[Entry], run: Run, dtype: torch.dtype, place: torch.device) -> Entry:
    """Join the states of a run's parameters, in `dtype`, with the number of steps on `place`."""
    entry: Entry = {}
    for key, value in entries[0].items():
        if key == "step":
            entry[key] = torch.as_tensor(value, device=place).detach().to(place, torch.float32, copy=True)
        elif not isinstance(value, Tensor):
            entry[key] = value
        elif key in COUNTERS or value.shape != to_local(run.slots[0].trained).shape:
            entry[key] = value.detach().to(run.value.device, copy=True)
        else:
            # It may have other strides or another precision in a file: use the layout of the run.
            tensor = torch.zeros_like(run.value, dtype=dtype if value.is_floating_point() else value.dtype)
            torch._foreach_copy_(run.parts(tensor), [entry[key] for entry in entries])
            entry[key] = tensor
    return entry


def _with_torchs_step(entry: Entry, group: Mapping[str, Any]) -> Entry:
    """Return a copy with torch's `step`: a plain number in torch_npu and old torch, in the group in NVIDIA's apex."""
    taken = {key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value) for key, value in entry.items()}
    steps = taken.get("step", group.get("step") if "exp_avg" in taken else None)
    if isinstance(steps, int | float):
        taken["step"] = torch.tensor(steps, dtype=torch.float32, device="cpu")
    return taken

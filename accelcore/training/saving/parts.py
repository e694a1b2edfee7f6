"""Contract of a part of a checkpoint, checks of saved values, and the parts that tell where a training is.

These are options, schedule, loss scale, open window, position in the data, random states and extra. The model is
in `model_parts`, and the optimizer's state in `optimizer_part`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelcore.errors import CheckpointError, logger
from accelcore.optim.shards import is_sharded, to_local
from accelcore.roles.runtime import Runtime
from accelcore.scaling.contract import LossScaler, described
from accelcore.training.data.data_stream import DataStream
from accelcore.training.gradients import Gradients
from accelcore.training.plan import Plan
from accelcore.training.schedule import Schedule
from accelcore.training.window import Window
from accelcore.util.text import is_whole

SHARED = "shared"  # file of the `shared_state` of every part but the model


@dataclass(frozen=True)
class Saved:
    """Contents of a verified checkpoint."""

    model: Mapping[str, Any]  # the model's state_dict
    shared: Mapping[str, Any]  # the `shared_state` of each part, by its name
    own: Mapping[str, Any]  # the `own_state` of each part, by its name
    same_job: bool  # whether as many ranks saved it as there are now, so that `own` is this rank's own
    source: str  # "the checkpoint ..." or another program's file, as messages name it
    path: str  # for `trainer.load`; empty for another program's file
    # the newest older checkpoint that was saved between two windows
    closed: Callable[[], Path | None] = lambda: None

    @property
    def micro(self) -> int:
        """Number of micro-batches of the window that was open; 0 between two windows."""
        return _number(as_dict(self.own.get("window"), "window", "micro")["micro"], "micro")

    def between_windows(self) -> str:
        """Return the remedy for a checkpoint that was saved within a window."""
        found = self.closed()
        named = (
            f'such as this older one: trainer.resume("{found}")' if found else "of which this folder has no older one"
        )
        return f"resume from a checkpoint saved between two windows, {named}"


class Part(ABC):
    """One kind of state, under its `name` in the files of a checkpoint.

    States are trees of dicts, lists, tuples, plain values and tensors.
    """

    name: str

    def shared_state(self) -> Any:
        """Return the state that all ranks share: it is equal on them, or divided by rows. None: nothing to save."""
        return None

    def own_state(self) -> Any:
        """Return the state that belongs to this rank. None: nothing to save."""
        return None

    @abstractmethod
    def prepare(self, saved: Saved) -> Callable[[], object]:
        """Check and convert the saved state without changing anything, and return the function that restores it.

        Raises:
            CheckpointError: the saved state is malformed, or does not fit.
        """


@dataclass(frozen=True)
class OptionsPart(Part):
    """Options that change the results. The training keeps its own, and the log names those that differ."""

    plan: Plan
    name = "options"

    def shared_state(self) -> Any:
        return {"accumulate": self.plan.options["accumulate"], "clip_norm": self.plan.options["clip_norm"]}

    def prepare(self, saved: Saved) -> Callable[[], object]:
        theirs, warns = as_dict(saved.shared.get(self.name, {}), "options"), self.plan.backend.collectives.rank == 0
        for name, own in self.shared_state().items() if warns else ():
            # With another number of ranks, another `accumulate` can keep the number of batches of a window.
            if theirs.get(name, own) != own and (saved.same_job or name != "accumulate"):
                text = "the checkpoint was saved with %s=%s, and this training has %s: the results differ"
                logger.warning(text, name, theirs[name], own)
        return lambda: None


@dataclass(frozen=True)
class SchedulePart(Part):
    """The schedule of the learning rate."""

    schedule: Schedule
    name = "schedule"

    def shared_state(self) -> Any:
        return self.schedule.state()

    def prepare(self, saved: Saved) -> Callable[[], object]:
        schedule = as_dict(saved.shared.get("schedule"), "schedule", "kind", "updates", "state")
        updates, state = schedule["updates"], schedule["state"]
        return self.schedule.prepare(
            schedule["kind"],
            None if updates is None else _number(updates, "updates"),
            {} if state is None else as_dict(state, "schedule"),
            saved.path,
        )


@dataclass(frozen=True)
class ScalerPart(Part):
    """The loss scale. If the training has another kind of loss scale, it keeps its own."""

    scaler: LossScaler
    name = "scaler"

    def shared_state(self) -> Any:
        return self.scaler.state_dict()

    def prepare(self, saved: Saved) -> Callable[[], object]:
        scaler, state = self.scaler, as_dict(saved.shared.get("scaler"), "loss scale")
        before = scaler.state_dict()
        if scaler.takes(state):
            _rehearse(scaler.load_state_dict, state, before)
            return lambda: scaler.load_state_dict(state)
        if saved.micro:
            remedy = f"resume with the precision it was saved with, or {saved.between_windows()}"
            raise CheckpointError("the checkpoint was saved within a window with another loss scale", remedy=remedy)
        logger.warning(
            "the checkpoint has %s, and this training %s: it keeps its own", described(state), described(before)
        )
        return lambda: None


@dataclass(frozen=True)
class WindowPart(Part):
    """The open window: number of micro-batches, their weights and gradients, and this rank's buffers."""

    model: nn.Module
    window: Window
    gradients: Gradients
    name = "window"

    def own_state(self) -> Any:
        open_ = self.window.micro > 0
        return {
            **self.window.state(),
            "gradients": self.gradients.state() if open_ else {},
            "sharded": self._is_sharded(),
            # Within a window the buffers of the ranks may differ; they become equal when it ends.
            "buffers": dict(self.model.named_buffers()) if open_ else {},
        }

    def prepare(self, saved: Saved) -> Callable[[], object]:
        keys = ("micro", "accumulate", "divisor", "unit", "total", "gradients", "sharded", "buffers")
        window = as_dict(saved.own.get("window"), "window", *keys)
        micro, accumulate = saved.micro, _number(window["accumulate"], "accumulate")
        if micro and (accumulate != self.window.accumulate or micro >= accumulate):
            raise CheckpointError(
                f"the checkpoint was saved after {micro} micro-batches of a window of {accumulate}, "
                f"and this trainer accumulates {self.window.accumulate}",
                remedy=f"resume with accumulate={accumulate}, or {saved.between_windows()}",
            )
        if micro and window["sharded"] != self._is_sharded():
            raise CheckpointError(
                "the checkpoint was saved within a window, and one of the checkpoint and this model is sharded",
                remedy=f"resume with the strategy it was saved with, or {saved.between_windows()}",
            )
        gradients, buffers = as_dict(window["gradients"], "gradients"), as_dict(window["buffers"], "buffers")
        own_buffers = dict(self.model.named_buffers())
        _check_shapes(gradients, {slot.name: to_local(slot.parameter) for slot in self.gradients.slots}, "gradient")
        _check_shapes(buffers, own_buffers, "buffer")
        total = None if window["total"] is None else window["total"].reshape(())
        unit = None if window["unit"] is None else float(window["unit"])
        divided = _number(window["divisor"], "divisor") / self.window.divisor

        def commit() -> None:
            with torch.no_grad():
                for name, value in buffers.items():
                    own_buffers[name].copy_(value)
                self.gradients.load_state({name: gradient * divided for name, gradient in gradients.items()})
            self.window.load_state(micro, unit, total)

        return commit

    def _is_sharded(self) -> bool:
        return any(is_sharded(slot.parameter) for slot in self.gradients.slots)


@dataclass(frozen=True)
class DataStreamPart(Part):
    """This rank's position in the data."""

    stream: DataStream
    runtime: Runtime
    name = "data"

    def own_state(self) -> Any:
        return self.stream.state_dict()

    def prepare(self, saved: Saved) -> Callable[[], object]:
        # "loader" is checked by the loader, which is not known before it is read.
        keys = ("epoch", "taken", "seed", "start", "generators", "form", "loader")
        position = as_dict(saved.own.get("data"), "position in the data", *keys)
        _number(position["epoch"], "epoch"), _number(position["taken"], "taken")
        as_dict(position["form"], "form of the loader")
        if position["seed"] is not None:
            _number(position["seed"], "seed")
        start, generators = as_dict(position["start"], "random state"), position["generators"]
        if not isinstance(generators, list) or not all(isinstance(state, Tensor) for state in generators):
            raise malformed("the checkpoint's position in the data has a random state that is not a tensor")
        if start:
            _rehearse(self.runtime.set_rng_state, start, self.runtime.rng_state())
        return lambda: self.stream.load_state_dict(position)


@dataclass(frozen=True)
class RandomPart(Part):
    """The random states of this rank."""

    runtime: Runtime
    name = "random"

    def own_state(self) -> Any:
        return self.runtime.rng_state()

    def prepare(self, saved: Saved) -> Callable[[], object]:
        if not saved.same_job:
            return lambda: None
        states, before = as_dict(saved.own.get("random"), "random states"), self.runtime.rng_state()
        _rehearse(self.runtime.set_rng_state, states, before)

        def commit() -> None:
            if left := self.runtime.set_rng_state(states):
                text = "the checkpoint's random states of %s are not restored: this run has no generator for them"
                logger.warning(text, ", ".join(left))
            if missing := sorted(before.keys() - states.keys()):
                text = "the checkpoint has no random state for %s: random numbers differ there from the saved run's"
                logger.warning(text, ", ".join(missing))

        return commit


@dataclass(frozen=True)
class ExtraPart(Part):
    """The script's own dict, restored in place: plain values, tensors, and lists, tuples and dicts of these."""

    extra: dict[str, Any]
    name: str = "extra"

    def shared_state(self) -> Any:
        return self.extra

    def prepare(self, saved: Saved) -> Callable[[], object]:
        extra = saved.shared.get(self.name)
        if not isinstance(extra, dict):
            raise malformed(f"the checkpoint's {self.name} is {extra!r}, not a dict")

        def commit() -> None:
            self.extra.clear()
            self.extra.update(extra)

        return commit


def malformed(problem: str) -> CheckpointError:
    """Return the error for a state that no part has saved."""
    return CheckpointError(
        problem, remedy="resume from another checkpoint: it was changed, or another program wrote it"
    )


def as_dict(tree: Any, what: str, *keys: str) -> dict[str, Any]:
    """Return `tree`; raise CheckpointError if it is not a dict with these keys."""
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise malformed(f"the checkpoint's {what} is a {type(tree).__name__}, not a dict")
    if missing := [key for key in keys if key not in tree]:
        raise malformed(f"the checkpoint's {what} lacks {', '.join(missing)}")
    return tree


def _number(value: Any, what: str) -> int:
    """Return `value`; raise CheckpointError if it is not a whole number >= 0."""
    if not is_whole(value):
        raise malformed(f"the checkpoint has {what}={value!r}, which is not a count")
    return value


def kind(value: Any) -> str:
    """Return what two values must have in common to replace each other: shape and dtype, or the class."""
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def _rehearse(load: Callable[[dict[str, Any]], object], state: dict[str, Any], before: dict[str, Any]) -> None:
    """Load a state, and then the earlier one: a state that does not load raises before anything is restored."""
    try:
        load(state)
    finally:
        load(before)


def _check_shapes(saved: Mapping[str, Any], own: Mapping[str, Tensor], what: str) -> None:
    for name, value in saved.items():
        if not isinstance(value, Tensor) or name not in own or own[name].shape != value.shape:
            raise malformed(f"the checkpoint has a {what} of {name!r}, {kind(value)}, which does not fit this model")

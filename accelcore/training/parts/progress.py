"""The smaller parts of a checkpoint: schedule, the open window, places in the data, random states."""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from accelcore.errors import CheckpointError
from accelcore.optim.shards import is_sharded, shard
from accelcore.roles.runtime import Runtime
from accelcore.training.data_stream import DataStreams
from accelcore.training.gradients import Gradients
from accelcore.training.parts.part import Change, Saved, kind, number, table
from accelcore.training.parts.put_back import copied, put_back
from accelcore.training.window import Window

__all__ = ["DataStreamsPart", "RandomPart", "SchedulePart", "WindowPart"]

logger = logging.getLogger("accelcore")


class SchedulePart:
    """The learning rate's schedule."""

    name = "schedule"
    scope: Literal["shared"] = "shared"

    def __init__(self, scheduler: LRScheduler | None, by: str) -> None:
        self._scheduler, self._by = scheduler, by

    def state(self) -> Any:
        state = None if self._scheduler is None else self._scheduler.state_dict()
        return {"kind": type(self._scheduler).__name__, "by": self._by, "state": state}

    def prepare(self, saved: Saved) -> Change:
        schedule = table(saved.shared.get("schedule"), "schedule", "kind", "by", "state")
        own, scheduler = self.state(), self._scheduler
        if schedule["kind"] != own["kind"]:
            raise CheckpointError(
                f"the checkpoint's scheduler is a {schedule['kind']}, not a {own['kind']}",
                remedy="build the trainer as it was built when the checkpoint was saved",
            )
        if schedule["by"] != self._by:
            raise CheckpointError(
                f"the checkpoint's scheduler is stepped by {schedule['by']}, and this one by {self._by}",
                remedy=f'say schedule_by="{schedule["by"]}", as where it was saved',
            )
        if scheduler is None:
            return Change(lambda: None)
        before, state = copied(own["state"]), table(schedule["state"], "schedule")
        return Change(
            lambda: scheduler.load_state_dict(state),
            lambda: put_back(scheduler.load_state_dict, before, scheduler.state_dict),
        )


class WindowPart:
    """The window that is open: its micro-batches, their weights, gradients, and the buffers ranks have of their own."""

    name = "window"
    scope: Literal["rank"] = "rank"

    def __init__(self, model: nn.Module, window: Window, gradients: Gradients) -> None:
        self._model, self._window, self._gradients = model, window, gradients

    def state(self) -> Any:
        open_ = self._window.micro > 0
        return {
            **self._window.state(),
            "gradients": self._gradients.state() if open_ else {},
            "sharded": self._is_sharded(),
            # Within a window the ranks' buffers may differ: they are made one when it ends.
            "buffers": dict(self._model.named_buffers()) if open_ else {},
        }

    def prepare(self, saved: Saved) -> Change:
        window = table(saved.own.get("window"), "window", "micro", "accumulate", "gradients", "sharded", "buffers")
        micro, accumulate = number(window["micro"], "micro"), number(window["accumulate"], "accumulate")
        if micro and (accumulate != self._window.accumulate or micro >= accumulate):
            raise CheckpointError(
                f"the checkpoint was saved after {micro} micro-batches of a window of {accumulate}, "
                f"and this trainer accumulates {self._window.accumulate}",
                remedy=f"resume with accumulate={accumulate}, or from a checkpoint saved between two windows",
            )
        if micro and window["sharded"] != self._is_sharded():
            raise CheckpointError(
                "the checkpoint was saved within a window, and only there or only here ranks divide the model",
                why="gradients of shards are of all ranks, others of each",
                remedy="resume with the strategy it was made with, or from a checkpoint saved between two windows",
            )
        gradients, buffers = table(window["gradients"], "gradients"), table(window["buffers"], "buffers")
        own_buffers = dict(self._model.named_buffers())
        shapes = {slot.name: shard(slot.parameter).shape for slot in self._gradients.slots}
        _fit(gradients, shapes, "gradient")
        _fit(buffers, {name: buffer.shape for name, buffer in own_buffers.items()}, "buffer")
        total, unit = window.get("total"), window.get("unit")
        divided = number(window.get("divisor", 1), "divisor") / self._window.divisor
        if not (total is None or (isinstance(total, Tensor) and total.numel() == 1)):
            raise CheckpointError(f"the checkpoint's window has the weight {kind(total)}, which is no scalar")
        if not (unit is None or isinstance(unit, float)):
            raise CheckpointError(f"the checkpoint's window counts weights in {unit!r}")

        def commit() -> None:
            with torch.no_grad():
                for name, value in buffers.items():
                    own_buffers[name].copy_(value)
                self._gradients.load_state({name: gradient * divided for name, gradient in gradients.items()})
            self._window.load_state({"micro": micro, "unit": unit, "total": total})

        return Change(commit)

    def _is_sharded(self) -> bool:
        return any(is_sharded(slot.parameter) for slot in self._gradients.slots)


class DataStreamsPart:
    """This rank's places in the data."""

    name = "feeds"
    scope: Literal["rank"] = "rank"

    def __init__(self, streams: DataStreams, runtime: Runtime) -> None:
        self._streams, self._runtime = streams, runtime

    def state(self) -> Any:
        return self._streams.state_dict()

    def prepare(self, saved: Saved) -> Change:
        positions = table(saved.own.get("feeds"), "places in the data")
        for name, position in positions.items():
            entry = table(position, f"place in {name}", "epoch", "taken", "seed", "start", "generators")
            number(entry["epoch"], "epoch"), number(entry["taken"], "taken")
            table(entry["start"], "random state")
            states = [*entry["start"].values(), *_list(entry["generators"])]
            if not all(isinstance(state, Tensor) for state in states):
                raise CheckpointError(f"the checkpoint's place in {name!r} holds a random state that is no tensor")
            if entry["start"]:
                _try(self._runtime, entry["start"])
            if entry["seed"] is not None:
                number(entry["seed"], "seed")
            # "loader" is for the loader to judge, which is not known before it is read.
        return Change(lambda: self._streams.load_state_dict(positions))


class RandomPart:
    """The random states of this rank."""

    name = "random"
    scope: Literal["rank"] = "rank"

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def state(self) -> Any:
        return self._runtime.rng_state()

    def prepare(self, saved: Saved) -> Change:
        if not saved.same_job:
            return Change(lambda: None)
        states, before = table(saved.own.get("random"), "random states"), self._runtime.rng_state()
        if strange := [name for name, state in states.items() if not isinstance(state, Tensor)]:
            raise CheckpointError(f"the checkpoint's random state {strange[0]!r} is no tensor")

        def commit() -> None:
            left = self._runtime.set_rng_state(states)
            if left:
                logger.warning("random states that this device or process has no generator for: %s", ", ".join(left))
            if missing := sorted(before.keys() - states.keys()):
                logger.warning("the checkpoint has no random state for %s: they go on as they are", ", ".join(missing))

        return Change(commit, lambda: _put_back(self._runtime, before))


def _try(runtime: Runtime, state: dict[str, Tensor]) -> None:
    """See that these are random states; they are needed when the stream is read, which is too late to refuse them."""
    before = runtime.rng_state()
    try:
        runtime.set_rng_state(state)
    finally:
        runtime.set_rng_state(before)


def _put_back(runtime: Runtime, state: dict[str, Tensor]) -> None:
    runtime.set_rng_state(state)


def _fit(saved: dict[str, Any], shapes: dict[str, torch.Size], what: str) -> None:
    for name, value in saved.items():
        if not isinstance(value, Tensor) or shapes.get(name) != value.shape:
            raise CheckpointError(
                f"the checkpoint has a {what} of {name!r}, {kind(value)}, which does not fit this model"
            )


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise CheckpointError(f"the checkpoint has a {type(value).__name__} where a list belongs")
    return value

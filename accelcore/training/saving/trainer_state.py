"""The state of one trainer as parts of a checkpoint, and the reading of these parts.

`TrainerState.parts` lists the parts, each of which has a class in this folder.

To restore, every rank first reads, checks and converts everything and changes nothing. If all ranks succeed, all
commit. A commit only fails in the user's own code, such as a hook. The trainers then refuse to train, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelcore.checkpoint import folders, store
from accelcore.checkpoint.manifest import MANIFEST, MODEL, RANK, digest_of_manifest, file_of
from accelcore.checkpoint.store import Checkpoint
from accelcore.devices import Roles
from accelcore.errors import CheckpointError, ConfigurationError, TrainingError, notice
from accelcore.scaling.contract import LossScaler
from accelcore.training.agreement import all_equal, all_or_none, wait_for_all
from accelcore.training.data.data_stream import DataStream
from accelcore.training.plan import Plan
from accelcore.training.saving.foreign import read_foreign
from accelcore.training.saving.model_parts import MastersPart, ModelPart, TrainedPart
from accelcore.training.saving.optimizer_part import OptimizerPart
from accelcore.training.saving.parts import (
    SHARED,
    DataStreamPart,
    ExtraPart,
    OptionsPart,
    Part,
    RandomPart,
    Saved,
    ScalerPart,
    SchedulePart,
    WindowPart,
    as_dict,
)
from accelcore.training.schedule import Schedule
from accelcore.training.step import Step
from accelcore.training.window import Window

_NEEDS_STATE = ("amsgrad", "centered", "momentum")
"""Options with which an optimizer has state that it does not have without them."""


class TrainerState:
    """The state of one trainer, as parts of a checkpoint."""

    writes = True  # whether `save` writes checkpoints. Neither a replay nor a trial writes any.
    starts_at: int | None = None  # of a replay, the number of steps after which the recorded run began; of a trial, 0
    spares_start = False  # whether the checkpoint that was resumed from is never deleted: a replay can begin there
    steps_kept = 0  # the steps that the last checkpoint holds which was saved or resumed
    step: Step  # the trainer's; it makes a new one, and sets this, in each `refresh`

    def __init__(
        self, plan: Plan, *, scaler: LossScaler, schedule: Schedule, stream: DataStream, window: Window
    ) -> None:
        self._plan, self._scaler, self._schedule, self._stream, self._window = plan, scaler, schedule, stream, window
        self.backend = plan.backend

    def load(self, path: str | Path, optimizer: bool | None) -> dict[str, Any]:
        if self.step.is_open:
            raise TrainingError(
                "trainer.load() was called within a window",
                why="its gradients belong to the present weights",
                remedy="load before the loop over the batches, or call trainer.flush() before",
            )
        training, file, backend = self.parts({}, writes=False), folders.as_path(path), self.backend
        wait_for_all(backend, "trainer.load()")
        with all_or_none(backend, "load"), as_checkpoint_error(file):
            commits, rest, checkpoint = self._prepare_load(training.parts, file, optimizer)
        check_same(backend, file, checkpoint)
        commit(backend, {"": training}, {"": commits}, {"": self.steps})
        if checkpoint is not None and backend.collectives.rank == 0:
            notice("loaded the model%s of %s", " and the optimizer's state" if optimizer else "", checkpoint.path)
        return rest

    def _prepare_load(
        self, parts: Sequence[Part], path: Path, optimizer: bool | None
    ) -> tuple[list[Callable[[], object]], dict[str, Any], Checkpoint | None]:
        """Return the functions that restore what `Trainer.load` takes, the rest, and the checkpoint if it is one."""
        share = self.backend.collectives.rank, self.backend.collectives.world_size
        named = {part.name: part for part in parts}
        optimizer_part = named["optimizer"]
        assert isinstance(optimizer_part, OptimizerPart), "it has this name"
        checkpoint, name = _find_checkpoint(path, share)
        if checkpoint is None:
            saved, rest = read_foreign(named, path, optimizer)
            takes = "optimizer" in saved.shared
        else:
            saved, takes = read_saved(checkpoint, name, *share, self.sharded), bool(optimizer)
            rest = saved.shared["extra"]
        if optimizer:
            shared = {**saved.shared, "optimizer": _with_options(saved, optimizer_part)}
            saved = replace(saved, shared=shared, own={"window": {"micro": 0}})  # without the gradients of a window
        wanted = ["model", "masters", *(["optimizer"] if takes else [])]
        return [named[part].prepare(saved) for part in wanted], rest, checkpoint

    @property
    def steps(self) -> int:
        return self._window.steps

    @property
    def place(self) -> str:
        """The steps done; and the epoch, if this trainer reads batches."""
        stream = self._stream
        return f"step {self.steps}" + (f", epoch {stream.position.epoch}" if stream.has_moved else "")

    @property
    def sharded(self) -> Mapping[str, Tensor]:
        """The parameters that are divided among the ranks, by all of their names."""
        plan = self._plan
        return dict(plan.model.named_parameters(remove_duplicate=False)) if plan.strategy.is_sharded else {}

    def parts(self, extra: dict[str, Any], *, writes: bool) -> TrainingParts:
        """Return the parts of this trainer's state, in the order in which they are restored; `writes`: to save them.

        A new kind of state is one more part.
        """
        self.step.check_model()
        if writes:
            self.step.check_saved()
            self._schedule.check()
            if self._stream.position.taken:
                self._stream.use.warn_if_untrained()
            if self.steps:
                self._stream.use.warn_if_unused()
        plan, runtime = self._plan, self.backend.runtime
        model, gradients = plan.model, plan.gradients
        model_part = ModelPart(model, gradients)
        parts = [
            model_part,
            MastersPart(model_part, gradients),
            SchedulePart(self._schedule),
            OptimizerPart(
                model, plan.optimizer, gradients, plan.strategy, is_scheduled=self._schedule.scheduler is not None
            ),
            TrainedPart(plan),
            OptionsPart(plan),
            ScalerPart(self._scaler),
            WindowPart(model, self._window, gradients),
            DataStreamPart(self._stream, runtime),
            ExtraPart(extra),
            RandomPart(runtime),
        ]
        return TrainingParts(self, parts)

    def restored(self, steps: int) -> None:
        """Continue after `steps` windows, when all parts are restored."""
        self._window.steps = steps
        if self._plan.captured is not None:
            self._plan.captured.forget()
        self._schedule.restored()
        self.step.resume()
        self.step.finite.begin(steps)


class TrainingParts(NamedTuple):
    """One trainer's share of a checkpoint: its state, and its parts in the order in which they are restored."""

    state: TrainerState
    parts: Sequence[Part]


Trainings = Mapping[str, TrainingParts]
"""Trainings of one checkpoint by the trainers' names; a trainer that is saved alone has the name ""."""


def commit(
    backend: Roles,
    trainings: Trainings,
    commits: Mapping[str, Sequence[Callable[[], object]]],
    steps: Mapping[str, int],
) -> None:
    """Restore all parts by their commits. If that fails on one rank, the trainers give up on every rank."""
    try:
        with all_or_none(backend, "restore its state"):
            for name, training in trainings.items():
                training.state.step.shared.acquire()
                for restore in commits[name]:
                    restore()
                training.state.restored(steps[name])
    except BaseException as error:
        what = "a checkpoint was restored in part"
        remedy = "make model, optimizer and trainer again, and resume; in a job, on all ranks"
        for training in trainings.values():
            training.state.step.give_up(what, remedy, error)
        if not isinstance(error, Exception):
            raise
        raise CheckpointError(what, why=repr(error), remedy=remedy) from error


@contextmanager
def as_checkpoint_error(folder: Path) -> Iterator[None]:
    """Convert any other error of a file or a state to a CheckpointError."""
    try:
        yield
    except (CheckpointError, ConfigurationError):
        raise
    except Exception as error:
        remedy = "give another checkpoint, or build model and optimizer as they were when it was saved"
        raise CheckpointError(f"{folder} cannot be restored", why=repr(error), remedy=remedy) from error


def read_saved(
    checkpoint: Checkpoint, trainer: str, rank: int, world_size: int, sharded: Mapping[str, Tensor]
) -> Saved:
    """Read one trainer's part of a checkpoint, for this rank."""
    saved_by = checkpoint.manifest["world_size"]
    same_job, like_of = saved_by == world_size, partial(_like_of, sharded)
    of_ranks = [file_of(trainer, f"{RANK}{number:05d}") for number in range(saved_by)]
    model = as_dict(checkpoint.read(file_of(trainer, MODEL), like_of), "model")
    shared = as_dict(checkpoint.read(file_of(trainer, SHARED), like_of), "training state")
    own = as_dict(checkpoint.read(of_ranks[rank if same_job else 0]), "state of this rank")
    if "state" not in (optimizer := as_dict(shared.get("optimizer"), "optimizer state")):
        optimizer["state"] = {}
        for file in of_ranks:  # each rank saved the state of the parameters that it updates
            divided = as_dict(checkpoint.read(file, like_of), file, "optimizer")["optimizer"]
            optimizer["state"] |= as_dict(as_dict(divided, "optimizer state", "state")["state"], "optimizer state")

    def is_closed(path: Path) -> bool:
        return not Checkpoint(path).read(of_ranks[0])["window"]["micro"]

    closed = partial(store.older, checkpoint.path, is_closed)
    path = str(checkpoint.path / trainer)
    return Saved(model, shared, own, same_job, f"the checkpoint {checkpoint.path}", path, closed)


def check_position(saved: Saved, saved_by: int, world_size: int) -> None:
    """Raise CheckpointError if a job of another size saved within an epoch: the data are divided in another way."""
    if saved.same_job:
        return
    if saved.micro or as_dict(saved.own.get("data"), "position in the data", "taken")["taken"]:
        raise CheckpointError(
            f"the checkpoint was saved within an epoch by a job of size {saved_by}, and this has size {world_size}",
            remedy=f"resume in a job of size {saved_by}, or from a checkpoint saved at the end of an epoch; or begin a "
            f'new run, in another folder, by trainer.load("{saved.path}", optimizer=True)',
        )


def _like_of(sharded: Mapping[str, Tensor], name: str, shape: torch.Size) -> Tensor | None:
    """Return the sharded parameter that a stored tensor of this shape belongs to, or None."""
    if name.startswith("optimizer.state."):
        name = name.removeprefix("optimizer.state.").rpartition(".")[0]
    parameter = sharded.get(name.removeprefix("masters."))
    return parameter if parameter is not None and parameter.shape == shape else None


def check_same(backend: Roles, folder: Path, checkpoint: Checkpoint | None) -> None:
    """Raise CheckpointError if the ranks have found different checkpoints."""
    if not all_equal(backend, "" if checkpoint is None else digest_of_manifest(checkpoint.manifest)):
        raise CheckpointError(
            f"the ranks do not find the same checkpoint in {folder}",
            why="this rank finds " + ("none" if checkpoint is None else checkpoint.path.name),
            remedy="give all ranks one folder that all of them see",
        )


def check_trainers(checkpoint: Checkpoint, trainings: Mapping[str, object]) -> None:
    """Raise CheckpointError if a checkpoint has other trainers than these."""
    saved = checkpoint.manifest["trainers"]
    if saved.keys() != trainings.keys():
        contains, resuming = (", ".join(filter(None, sorted(names))) or "one trainer" for names in (saved, trainings))
        together = f"accelcore.Together({', '.join(f'{name}=...' for name in saved)}).resume(...)"
        raise CheckpointError(
            f"the checkpoint {checkpoint.path} contains {contains}, but you are resuming {resuming}",
            remedy="resume it as it was saved: by " + ("trainer.resume(...)" if "" in saved else together),
        )


def _find_checkpoint(path: Path, share: tuple[int, int]) -> tuple[Checkpoint | None, str]:
    """Return the checkpoint at `path` or the newest in it, and the trainer's name; None for another program's file."""
    path = path.resolve()  # the parent of ".." is not the folder above
    if path.is_dir() and (path.parent / MANIFEST).is_file():  # one of several trainers
        return Checkpoint(path.parent, share), path.name
    if not ((path / MANIFEST).is_file() or any(path.glob(f"*/{MANIFEST}"))):
        return None, ""
    checkpoint = store.find(path, share)
    if checkpoint is not None and "" not in (trainers := checkpoint.manifest["trainers"]):
        raise CheckpointError(
            f"the checkpoint {checkpoint.path} holds several trainers: {', '.join(trainers)}",
            remedy=f'give the folder of one: trainer.load("{checkpoint.path / next(iter(trainers))}")',
        )
    return checkpoint, ""


def _with_options(saved: Saved, part: OptimizerPart) -> dict[str, Any]:
    """Return a saved optimizer with the options of this one."""
    other, own = saved.shared["optimizer"], part.shared_state()
    if (other.get("kind", own["kind"]), len(other["groups"])) != (own["kind"], len(own["groups"])):
        return dict(other)  # which is refused
    groups = []
    for theirs, ours in zip(other["groups"], own["groups"], strict=True):
        if needed := [key for key in _NEEDS_STATE if ours.get(key) and not theirs.get(key)]:
            raise CheckpointError(
                f"{saved.source} has no optimizer state for {needed[0]}={ours[needed[0]]}",
                why=f"the optimizer that was saved had {needed[0]}={theirs.get(needed[0])}",
                remedy="give the optimizer that value, or load the model without optimizer=True",
            )
        if ours.get("t_total", -1) != -1:
            raise CheckpointError(
                f"the optimizer has a schedule of its own, t_total={ours['t_total']}",
                why="it is counted by the state of the optimizer, so it would not begin new",
                remedy="load the model without optimizer=True; or remove t_total, and give the trainer a scheduler=",
            )
        groups.append({**ours, **part.results(theirs), "params": theirs["params"]})
    return {**other, "groups": groups}

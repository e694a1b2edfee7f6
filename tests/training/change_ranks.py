"""One rank of a job whose model is changed: `change_ranks.py all FOLDER`, or `change_ranks.py alone STRATEGY CALL`.

All: each rank makes every change under every strategy, and writes what it found to FOLDER/RANK.json. Alone: rank 1
makes a change, rank 0 does not, and the job ends; both call `refresh`, or neither.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch

import accelcore
from tests.training.change_models import (
    ACCUMULATE,
    CHANGED_BEFORE,
    CHANGES,
    KINDS,
    MICRO_BATCHES,
    apply,
    batch,
    loss_of,
    start,
    state,
)

WHOLE, SHARDED = ("ddp", "combine_ddp", "zero1"), ("fsdp", "zero2")


def train(accel, rank, parallel, kind, change, *, calls=1):
    """The model that a trainer has trained, and the trainer."""
    model, members = start(change)
    optimizer = KINDS[kind](accel, members)
    trainer = accel.trainer(model, optimizer, loss=loss_of, accumulate=ACCUMULATE, parallel=parallel)
    for number in range(MICRO_BATCHES):
        if number == CHANGED_BEFORE:
            apply(change, model, optimizer, rank)
            trainer.refresh()
        if calls == 1:
            trainer(batch(rank, number))
        else:
            trainer.backward(loss_of(trainer.forward, batch(rank, number)))
            trainer.update()
    return model, trainer


def refused(accel, rank, parallel, kind, folder):
    """What a layer that is no shard is answered, at each call, and whether anything moved meanwhile."""
    model, members = start("add")
    optimizer = KINDS[kind](accel, members)
    trainer = accel.trainer(model, optimizer, loss=loss_of, accumulate=ACCUMULATE, parallel=parallel)
    for number in range(4):
        trainer(batch(rank, number))
    apply("add", model, optimizer, rank)
    before, said = state(model), []
    calls = lambda: trainer(batch(rank, 6)), trainer.refresh, lambda: trainer.save(folder / "checkpoint")
    for call in calls * 2:
        try:
            call()
        except (accelcore.ConfigurationError, accelcore.TrainingError) as error:
            said.append(str(error))
    return {"said": said, "unchanged": state(model) == before}


def frozen_layer_added(accel, rank, parallel):
    """A new layer that nobody trains is the same on all ranks, too."""
    model, members = start("freeze")
    trainer = accel.trainer(model, KINDS["own"](accel, members), loss=loss_of, parallel=parallel)
    trainer(batch(rank, 0))
    torch.manual_seed(20 + rank)
    model.added = torch.nn.Linear(4, 4).requires_grad_(False)
    trainer.refresh()
    trainer(batch(rank, 1))
    return state(model)


def changed_within_a_window(accel, rank, parallel, when):
    """Before the last micro-batch of a window, or between its forward and its backward pass."""
    model, members = start("freeze")
    optimizer = KINDS["own"](accel, members)
    trainer = accel.trainer(model, optimizer, loss=loss_of, accumulate=ACCUMULATE, parallel=parallel)
    trainer.backward(loss_of(trainer.forward, batch(rank, 0)))
    trainer.update()
    before = state(model)
    if when == "before forward":
        apply("freeze", model, optimizer, rank)
    said = ""
    try:
        loss = loss_of(trainer.forward, batch(rank, 1))
        if when == "after forward":
            apply("freeze", model, optimizer, rank)
        trainer.backward(loss)
    except accelcore.TrainingError as error:
        said = str(error)
    unchanged = state(model) == before
    trainer.refresh()
    for number in range(2, 4):
        trainer(batch(rank, number))
    return {"said": said, "unchanged": unchanged, "after": state(model)}


def caught(accel, rank, parallel, folder):
    """Rank 1 freezes a layer alone, both ranks catch the error of refresh, and go on: what each call answers."""
    model, members = start("freeze")
    trainer = accel.trainer(model, KINDS["own"](accel, members), loss=loss_of, parallel=parallel)
    trainer(batch(rank, 0))
    if rank == 1:
        apply("freeze", model, trainer.optimizer, rank)
    before, said = state(model), []
    calls = {
        "refresh": trainer.refresh,
        "call": lambda: trainer(batch(rank, 1)),
        "forward": lambda: trainer.forward,
        "batches": lambda: next(iter(trainer.batches([batch(rank, 1)]))),
        "evaluate": lambda: trainer.evaluate([batch(rank, 1)]),
        "save": lambda: trainer.save(folder / "caught"),
        "refresh again": trainer.refresh,
    }
    for name, call in calls.items():
        try:
            call()
        except accelcore.AccelError as error:
            said.append((name, type(error).__name__, str(error)))
    return {"said": said, "unchanged": state(model) == before}


def all_together(folder: Path) -> None:
    accel = accelcore.select("cpu")
    with accel.distributed() as job:
        found = {}
        for parallel in (*WHOLE, *SHARDED):
            for kind in KINDS:
                for change in CHANGES:
                    case = f"{parallel}, {kind}, {change}"
                    if parallel in SHARDED and change == "add":
                        found[case] = refused(accel, job.rank, parallel, kind, folder)
                    else:
                        calls = 3 if kind == "own" else 1
                        found[case] = state(train(accel, job.rank, parallel, kind, change, calls=calls)[0])
        found["frozen layer added"] = {each: frozen_layer_added(accel, job.rank, each) for each in WHOLE}
        for parallel in (*WHOLE, *SHARDED):
            for when in ("before forward", "after forward")[: 1 if parallel in SHARDED else 2]:
                case = f"{parallel}, {when}"
                found[case] = changed_within_a_window(accel, job.rank, parallel, when)
        for parallel in (*WHOLE, *SHARDED):
            found[f"{parallel}, caught"] = caught(accel, job.rank, parallel, folder)
        (folder / f"{job.rank}.json").write_text(json.dumps(found))


def one_alone(parallel: str, call: str) -> None:
    accel = accelcore.select("cpu")
    with accel.distributed(timeout=timedelta(minutes=10)) as job:  # by which the test is over
        model, members = start("freeze")
        optimizer = KINDS["own"](accel, members)
        trainer = accel.trainer(model, optimizer, loss=loss_of, accumulate=ACCUMULATE, parallel=parallel)
        for number in range(MICRO_BATCHES):
            if number == CHANGED_BEFORE:
                if job.rank == 1:
                    apply("freeze", model, optimizer, job.rank)
                if call == "refresh":
                    trainer.refresh()
            trainer(batch(job.rank, number))


if __name__ == "__main__":
    torch.set_num_threads(1)
    all_together(Path(sys.argv[2])) if sys.argv[1] == "all" else one_alone(*sys.argv[2:])

"""One rank of a job whose model is changed: `change_ranks.py all FOLDER`, or `change_ranks.py alone STRATEGY WHEN`.

All: each rank makes every change under every strategy, and writes what it found to FOLDER/RANK.json. Alone: rank 1
makes a change, rank 0 does not, and the job ends.
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
    CHANGES,
    KINDS,
    MICRO_BATCHES,
    WHEN,
    apply,
    batch,
    loss_of,
    start,
    state,
)

WHOLE, SHARDED = ("ddp", "combine_ddp", "zero1"), ("fsdp", "zero2")


def train(accel, rank, parallel, kind, change, when, *, calls=1):
    """The model that a trainer has trained, and the trainer."""
    model, members = start(change)
    optimizer = KINDS[kind](accel, members)
    trainer = accel.trainer(model, optimizer, loss=loss_of, accumulate=ACCUMULATE, parallel=parallel)
    for number in range(MICRO_BATCHES):
        if number == WHEN[when]:
            apply(change, model, optimizer, rank)
        if calls == 1:
            trainer(batch(rank, number))
        else:
            trainer.backward(loss_of(trainer.forward, batch(rank, number)))
            trainer.update()
    return model, trainer


def refused(accel, rank, parallel, kind, when, folder):
    """What a layer that is no shard is answered, at each call, and whether anything moved meanwhile."""
    model, members = start("add")
    optimizer = KINDS[kind](accel, members)
    trainer = accel.trainer(model, optimizer, loss=loss_of, accumulate=ACCUMULATE, parallel=parallel)
    for number in range(4):
        trainer(batch(rank, number))
    if when == "within a window":
        trainer(batch(rank, 4))
    apply("add", model, optimizer, rank)
    if when == "within a window":
        trainer(batch(rank, 5))
    before, said = state(model), []
    for call in (lambda: trainer(batch(rank, 6)), lambda: trainer.save(folder / "checkpoint")) * 2:
        try:
            call()
        except accelcore.ConfigurationError as error:
            said.append(str(error))
    return {"said": said, "unchanged": state(model) == before}


def frozen_layer_added(accel, rank, parallel):
    """A new layer that nobody trains is the same on all ranks, too."""
    model, members = start("freeze")
    trainer = accel.trainer(model, KINDS["own"](accel, members), loss=loss_of, parallel=parallel)
    trainer(batch(rank, 0))
    torch.manual_seed(20 + rank)
    model.added = torch.nn.Linear(4, 4).requires_grad_(False)
    trainer(batch(rank, 1))
    return state(model)


def changed_after_forward(accel, rank):
    """Under ddp, a change between the last forward pass of a window and its backward pass."""
    model, members = start("freeze")
    optimizer = KINDS["own"](accel, members)
    trainer = accel.trainer(model, optimizer, loss=loss_of, accumulate=ACCUMULATE, parallel="ddp")
    trainer.backward(loss_of(trainer.forward, batch(rank, 0)))
    trainer.update()
    loss = loss_of(trainer.forward, batch(rank, 1))
    apply("freeze", model, optimizer, rank)
    try:
        trainer.backward(loss)
    except accelcore.TrainingError as error:
        return str(error)
    return ""


def all_together(folder: Path) -> None:
    accel = accelcore.select("cpu")
    with accel.distributed() as job:
        found = {}
        for parallel in (*WHOLE, *SHARDED):
            for kind in KINDS:
                for change in CHANGES:
                    for when in WHEN:
                        case = f"{parallel}, {kind}, {change} {when}"
                        if parallel in SHARDED and change == "add":
                            found[case] = refused(accel, job.rank, parallel, kind, when, folder)
                        else:
                            calls = 3 if kind == "own" else 1
                            found[case] = state(train(accel, job.rank, parallel, kind, change, when, calls=calls)[0])
        found["frozen layer added"] = {each: frozen_layer_added(accel, job.rank, each) for each in WHOLE}
        found["changed after forward"] = changed_after_forward(accel, job.rank)
        (folder / f"{job.rank}.json").write_text(json.dumps(found))


def one_alone(parallel: str, when: str) -> None:
    accel = accelcore.select("cpu")
    with accel.distributed(timeout=timedelta(minutes=10)) as job:  # by which the test is over
        model, members = start("freeze")
        optimizer = KINDS["own"](accel, members)
        trainer = accel.trainer(model, optimizer, loss=loss_of, accumulate=ACCUMULATE, parallel=parallel)
        for number in range(MICRO_BATCHES):
            if number == WHEN[when] and job.rank == 1:
                apply("freeze", model, optimizer, job.rank)
            trainer(batch(job.rank, number))


if __name__ == "__main__":
    torch.set_num_threads(1)
    all_together(Path(sys.argv[2])) if sys.argv[1] == "all" else one_alone(*sys.argv[2:])

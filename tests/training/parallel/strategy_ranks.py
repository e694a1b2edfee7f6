"""One rank of a job that trains under one strategy in many ways: `strategy_ranks.py CASE FOLDER`.

Each rank writes what it found to FOLDER/RANK.json; test_strategies.py judges it.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

import accelcore
from accelcore import Policy
from accelcore.torch_features import UNUSED_SHARDS
from tests.training.parallel.strategy_models import (
    DECAY,
    LEVELS,
    LR,
    Net,
    Normed,
    Waves,
    Wide,
    batch,
    loss_at_level,
    loss_of,
    used,
)

CASES = {
    "ddp": {"parallel": "ddp"},
    "ddp flat": {"parallel": "ddp", "flat": True},
    "combine": {"parallel": "combine_ddp", "flat": False},
    "combine flat": {"parallel": "combine_ddp", "flat": True},
    "fsdp": {"parallel": "fsdp"},
    "zero1": {"parallel": "zero1", "flat": False},
    "zero1 flat": {"parallel": "zero1", "flat": True},
    "combine bf16": {"parallel": "combine_ddp", "comm_dtype": "bfloat16"},
}


def make(accel, options, *, seed=0, **more):
    model = Net(seed)
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=LR, weight_decay=DECAY, eps=1e-3)
    return accel.trainer(model, optimizer, loss=loss_of, **{**options, **more})


def state(model):
    return {name: whole(value).double().flatten().tolist() for name, value in model.state_dict().items()}


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def trains(accel, rank, options):
    """Ranks start apart; parts go unused on one rank, in some micro-batches; one part is never used."""
    found = {}
    for name, more in (
        ("plain", {}), ("accumulated", {"accumulate": 2, "clip_norm": 0.3}), ("scaled", {"loss_scale": "dynamic"}),
    ):  # fmt: skip
        trainer = make(accel, options, seed=rank, **more)
        for number in range(6):
            trainer((batch(rank, number), used(rank, number)))
        found[name] = state(trainer.model)
    trainer = make(accel, options, seed=rank, accumulate=4)
    for number in range(6):
        trainer((batch(rank, number), used(rank, number)))
    trainer.flush()
    found["short"] = state(trainer.model)
    return found


def weighted(accel, rank, options):
    """Micro-batches of 2 to 9 rows; the windows' gradients are those of the mean over all rows."""
    trainer = make(accel, options, seed=rank, accumulate=2, weight=lambda batch: len(batch[0]))
    trainer.model.norm.eval()
    for number in range(5):
        trainer((batch(rank, number, 2 + 3 * rank + number), True))
    trainer.flush()
    return state(trainer.model)


def overflows(accel, rank, options):
    """An overflow on rank 1 only."""
    trainer = make(accel, options, seed=rank, loss_scale="dynamic")
    trainer((batch(rank, 0), True))
    before = state(trainer.model)
    trainer.model.norm.eval()
    trainer((batch(rank, 1) * (math.inf if rank else 1.0), True))
    unchanged = state(trainer.model) == before
    trainer((batch(rank, 2), True))
    return {"unchanged": unchanged, "skipped": trainer.skipped, "after": state(trainer.model)}


def changes(accel, rank, options):
    """A layer is unfrozen, one is frozen, one is added while the training goes on."""
    model = Net(rank)
    model.sometimes.requires_grad_(False)
    groups = [{"params": list(model.parameters())}]
    optimizer = accel.optimizers.create("sgd", groups, lr=LR)
    trainer = accel.trainer(model, optimizer, loss=loss_of, **options)
    for number in range(6):
        if number == 2:
            model.sometimes.requires_grad_(True)
        if number == 4:
            model.inward.requires_grad_(False)
        if number in (2, 4):
            trainer.refresh()
        trainer((batch(rank, number), True))
    torch.manual_seed(5)
    model.never = nn.Linear(4, 4)
    try:
        trainer.refresh()
        refused = ""
    except accelcore.TrainingError as error:
        refused = str(error)
    return {"state": state(model), "refused": refused}


def masters(accel, rank, options):
    """A bf16 model whose updates are smaller than bf16 can hold: the masters add them up, on all ranks alike."""
    torch.manual_seed(rank)
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=5e-4)
    trainer = accel.trainer(
        model, optimizer, loss=lambda m, rows: m(rows).sum(), precision=Policy(model_dtype="bfloat16"), **options
    )
    for number in range(40):
        if number % 10 == 0:  # the trainer is prepared again, and the masters stay exact
            model.bias.requires_grad_(not model.bias.requires_grad)
            trainer.refresh()
        trainer(torch.ones(1, 4, dtype=torch.bfloat16))
    return whole(model.state_dict()["weight"]).double().flatten().tolist()


def starts(accel, rank, options):
    """The first values of masters, which torch's optimizers have in their groups; ranks were given different ones."""
    found = {}
    for name, policy in (
        ("bf16", Policy(model_dtype="bfloat16")),
        ("O2", replace(Policy.preset("O2"), loss_scale=1.0)),
    ):
        model = Normed()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += rank
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        try:
            accel.trainer(model, optimizer, loss=loss_at_level, precision=policy, **options)
        except accelcore.UnsupportedError as error:
            found[name] = str(error)
            continue
        found[name] = [whole(held).flatten().tolist() for held in optimizer.param_groups[0]["params"]]
    return found


def levels(accel, rank, options):
    """apex's levels; O2 with a static loss scale."""
    found = {}
    for level in LEVELS:
        model = Normed()
        optimizer = accel.optimizers.create("sgd", model.parameters(), lr=LR)
        try:
            policy = replace(Policy.preset(level), loss_scale=128.0 if level == "O2" else None)
            trainer = accel.trainer(model, optimizer, loss=loss_at_level, precision=policy, **options)
        except accelcore.UnsupportedError as error:
            found[level] = str(error)
            continue
        for number in range(6):
            trainer(batch(rank, number))
        found[level] = {name: whole(value).double().flatten().tolist() for name, value in model.state_dict().items()}
    return found


def large(accel, rank, options):
    """How far large parameters are from those that one process trains on the batches of both ranks."""

    def loss(model, batch):
        return model(*batch).square().mean()

    def rows(rank, number):
        return torch.randn(3, 300, generator=torch.Generator().manual_seed(50 * rank + number))

    trainer = accel.trainer(
        model := Wide(), accel.optimizers.create("sgd", model.parameters(), lr=LR), loss=loss, accumulate=2, **options
    )
    expected = Wide()
    oracle = torch.optim.SGD(expected.parameters(), lr=LR)
    for number in range(8):
        trainer((rows(rank, number), number % 4 != 1 and number < 6))
        for other in range(2):
            (loss(expected, (rows(other, number), number % 4 != 1 and number < 6)) / 4).backward()
        if number % 2:
            oracle.step()
            oracle.zero_grad()
    every = [[each.detach() for each in net.parameters()] for net in (model, expected, Wide())]
    return max(float((mine - its).norm() / (its - start).norm()) for mine, its, start in zip(*every, strict=True))


def waves(accel, rank, options):
    """How far complex parameters are from those that one process trains on the batches of both ranks."""
    model, expected = Waves(), Waves()
    try:
        trainer = accel.trainer(
            model, accel.optimizers.create("sgd", model.parameters(), lr=LR), loss=lambda m, b: m(*b), **options
        )
    except (accelcore.ConfigurationError, accelcore.UnsupportedError) as error:
        return str(error)
    trainer((batch(rank, 0)[:, :3], rank == 1))
    for other in range(2):
        (expected(batch(other, 0)[:, :3], other == 1) / 2).backward()
    torch.optim.SGD(expected.parameters(), lr=LR).step()
    assert all(
        torch.equal(parameter, Waves().never) != (name != "never") for name, parameter in model.named_parameters()
    )
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max(float((mine - its).detach().abs().max()) for mine, its in pairs)


class Norms(accelcore.Observer):
    def __init__(self):
        self.found = []

    def gradient_norm(self, norm):
        self.found.append(norm.item())


def lone_observer(accel, rank, options):
    """The norms that an observer of rank 0 finds, and the parameters; the scale is no power of two."""
    norms = Norms()
    scale = accelcore.LossScale(init=100.0)
    trainer = make(accel, options, seed=rank, loss_scale=scale, observers=[norms] if rank == 0 else [])
    for number in range(2):
        trainer((batch(rank, number), True))
    return {"norms": norms.found, "state": state(trainer.model)}


def failures(accel, rank, options):
    """A backward pass that fails in a job: the trainer does not go on as if nothing had been."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise MemoryError("backward")

    trainer = make(accel, options, accumulate=2)
    said = []
    model, optimizer = nn.Linear(4, 1), None
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    trainer = accel.trainer(model, optimizer, loss=lambda m, rows: Fails.apply(m(rows)).mean(), **options)
    for _ in range(2):
        try:
            trainer(batch(rank, 0))
        except (MemoryError, accelcore.TrainingError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def shared_batch(accel, rank, options):
    """What is said of batches from no stream, in loops of one call and of three; and of those from one, nothing."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("accelcore").addHandler(handler)

    def three_calls(trainer, rows):
        with trainer.autocast():
            loss = loss_of(trainer.forward, (rows, True))
        trainer.backward(loss)
        trainer.update()

    said = {}
    for loop, train in (("one call", lambda trainer, rows: trainer((rows, True))), ("three calls", three_calls)):
        gc.collect()  # trainers of before, whose batches came from streams
        trainer = make(accel, options, accumulate=2)
        for number in range(4):
            train(trainer, batch(0, number))
        said[loop], records[:] = records[:], []
        reading, other = make(accel, options), make(accel, options)
        for rows in reading.evaluate([batch(0, 0), batch(0, 1)]):
            reading.forward(rows, True)
        for rows in reading.batches([batch(rank, 0)], shard=False):
            train(other, rows)  # as the generator beside the critic
            train(reading, rows)
        said[f"{loop}, streams"], records[:] = records[:], []
        del reading, other
    logging.getLogger("accelcore").removeHandler(handler)
    return said


def checkpoints(accel, rank, options, folder):
    """Saved in an open window, resumed by all; and resumes that only one rank can do."""

    def run(trainer, numbers):
        for number in numbers:
            trainer((batch(rank, number), used(rank, number)))
        return trainer

    options = {**options, "accumulate": 2}
    whole = run(make(accel, options, seed=rank), range(6))
    run(make(accel, options, seed=rank), range(3)).save(folder / "shared")
    again = make(accel, options, seed=rank + 7)
    again.resume(folder / "shared")
    found = {"same": state(run(again, range(3, 6)).model) == state(whole.model)}
    found["whole"] = state(whole.model)
    other = "ddp" if options["parallel"] == "combine_ddp" else "combine_ddp"
    crossed = make(accel, {"parallel": other, "accumulate": 2}, seed=rank + 7)
    try:
        crossed.resume(folder / "shared")
        found["crossed"] = state(run(crossed, range(3, 6)).model)
    except accelcore.CheckpointError as error:
        found["refused"] = str(error)
    before = state(again.model)
    try:
        again.resume(folder / ("shared" if rank == 0 else "not here"))
    except accelcore.CheckpointError as error:
        found["one rank"] = str(error)
    found["unchanged"] = state(again.model) == before
    return found


def only_one_saves(accel, rank, options, folder):
    trainer = make(accel, options)
    try:
        if rank == 0:
            trainer.save(folder / "lonely")
    except accelcore.DistributedError as error:
        return str(error)
    return ""


def older_torch(accel, rank, options):
    """Train as torch before 2.13 does, which leaves unused parameters to accelcore."""
    from torch.distributed.fsdp import FSDPModule

    if UNUSED_SHARDS.present:
        del FSDPModule.set_reduce_scatter_unused_params
    assert not UNUSED_SHARDS.present
    return trains(accel, rank, options)


def main() -> None:
    case, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    accel, options = accelcore.select("cpu"), CASES[case]
    with accel.distributed() as job:
        found = {
            "trains": trains(accel, job.rank, options),
            "weighted": weighted(accel, job.rank, options),
            "overflows": overflows(accel, job.rank, options),
            "changes": changes(accel, job.rank, options),
            "masters": masters(accel, job.rank, options),
            "starts": starts(accel, job.rank, options),
            "shared_batch": shared_batch(accel, job.rank, options),
            "checkpoints": checkpoints(accel, job.rank, options, folder),
            "levels": levels(accel, job.rank, options),
            "large": None if "fsdp" in case else large(accel, job.rank, options),
            "observed": lone_observer(accel, job.rank, options),
            "waves": waves(accel, job.rank, options),
            "failures": failures(accel, job.rank, options),
        }
        if case == "fsdp":
            found["older torch"] = older_torch(accel, job.rank, options)
        (folder / f"{job.rank}.json").write_text(json.dumps(found))


def lonely() -> None:
    folder = Path(sys.argv[2])
    accel = accelcore.select("cpu")
    try:
        with accel.distributed(timeout=timedelta(seconds=3)) as job:
            rank = job.rank
            said = only_one_saves(accel, rank, CASES["ddp"], folder)
            (folder / f"lonely-{rank}.json").write_text(json.dumps(said))
    except RuntimeError:
        pass  # the other rank is gone by then


if __name__ == "__main__":
    lonely() if sys.argv[1] == "lonely" else main()

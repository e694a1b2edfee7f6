"""Scenarios that several ranks run, one after the other: `ranks.py FOLDER SCENARIO...`, started by test_parallel.py.

Each rank writes what it found to FOLDER/RANK.json, by the scenarios' names.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import accelcore


def net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def rows(count: int = 16) -> TensorDataset:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(2))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def loss_of(model, batch):
    return mse_loss(model(batch[0]), batch[1])


def trained(accel, *, wrap, parallel, **options):
    """Weights after one epoch; ranks start from different weights, which DDP must not let them keep."""
    model = net()
    if accel.collectives.rank:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    trainer = accel.trainer(wrap(model), optimizer, loss=loss_of, parallel=parallel, **options)
    assert trainer.model is model
    for batch in trainer.batches(DataLoader(rows(), 2)):
        trainer(batch)
    return {"weights": [parameter.detach().flatten().tolist() for parameter in model.parameters()]}


def wrapped(accel, folder):
    """Models that are wrapped in DDP, compiled or not, in both orders; how often the wrapper reduced a bucket."""
    found = []
    for compiled in ((), ("inside",), ("outside",)):
        reduced = []

        def count(_, bucket, reduced=reduced):
            reduced.append(bucket.index())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        def wrap(model, compiled=compiled, count=count):
            model = torch.compile(model, backend="eager") if "inside" in compiled else model
            wrapper = DDP(model)
            wrapper.register_comm_hook(None, count)
            return torch.compile(wrapper, backend="eager") if "outside" in compiled else wrapper

        options = {"compile": {"backend": "eager"}} if compiled else {}
        found.append(trained(accel, wrap=wrap, parallel=None, **options) | {"reduced": reduced})
    try:
        trained(accel, wrap=DDP, parallel="combine_ddp")
    except accelcore.ConfigurationError as error:
        return {"found": found, "refused": str(error)}
    return {"found": found, "refused": None}


def shuffled(accel, folder):
    torch.manual_seed(100 + accel.collectives.rank)  # differently seeded ranks must still agree on the order
    loader = DataLoader(rows(), 2, shuffle=True)
    trainer = accel.trainer(model := net(), accel.optimizers.create("sgd", model.parameters()), parallel="ddp")
    epochs = [[row for batch in trainer.batches(loader) for row in batch[0][:, 0].tolist()] for _ in range(2)]
    return {"epochs": epochs}


def bare_forward(accel, folder):
    model = net()
    trainer = accel.trainer(model, accel.optimizers.create("sgd", model.parameters()), parallel="ddp")
    said = []
    for forward in (model, trainer.forward):
        try:
            trainer.backward(loss_of(forward, rows()[:2]))
        except accelcore.TrainingError as error:
            said.append(str(error))
    refused, then = said
    return {"refused": refused, "then": then}


def around_after_evaluation(accel, folder):
    """An evaluation through the replicas must not make a training step around them look right."""
    model = net()
    trainer = accel.trainer(model, accel.optimizers.create("sgd", model.parameters()), parallel="ddp")
    with torch.no_grad():
        trainer.forward(rows()[:2][0])
    try:
        trainer.backward(loss_of(model, rows()[:2]))
    except accelcore.TrainingError as error:
        return {"refused": str(error)}
    return {"refused": None}


def none_is_refused(accel, folder):
    model = net()
    try:
        accel.trainer(model, accel.optimizers.create("sgd", model.parameters()))
    except accelcore.ConfigurationError as error:
        return {"refused": str(error)}
    return {"refused": None}


def resumed(accel, folder):
    """Losses of an undisturbed run, and of one saved within a window of its second epoch and resumed."""

    def start():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        torch.manual_seed(50 + accel.collectives.rank)
        optimizer = accel.optimizers.create("adamw", model.parameters(), lr=1e-2)
        trainer = accel.trainer(model, optimizer, loss=loss_of, parallel="ddp", accumulate=2)
        return trainer, DataLoader(rows(20), 2, shuffle=True)

    def run(trainer, loader, save_after=None):
        losses = []
        for _ in range(trainer.epoch, 3):
            for batch in trainer.batches(loader):
                losses.append(trainer(batch).item())
                if len(losses) == save_after:
                    trainer.save(folder / "checkpoints")
                    return losses
        return losses

    expected = run(*start())
    losses = run(*start(), save_after=8)
    trainer, loader = start()
    path = trainer.resume(folder / "checkpoints")
    return {"expected": expected, "losses": losses + run(trainer, loader), "path": str(path)}


def dropped(accel, folder):
    """What is left of trainers that are gone: hooks on the parameters, and replicas; alive and dropped, in turn."""

    def left():
        gc.collect()
        hooks = [len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters()]
        return {"hooks": max(hooks), "replicas": sum(type(each) is DDP for each in gc.get_objects())}

    model = net()
    found = {}
    for parallel in accel.capabilities.parallel:
        if parallel == "none":
            continue
        for _ in range(3):
            trainer = accel.trainer(
                model, accel.optimizers.create("sgd", model.parameters()), loss=loss_of, parallel=parallel
            )
            trainer(rows()[:2])
        model[0].requires_grad_(False)
        trainer.refresh()
        trainer(rows()[:2])
        model[0].requires_grad_(True)
        alive = left()
        del trainer
        found[parallel] = [alive, left()]
    return found


def main() -> None:
    folder, scenarios = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    accel = accelcore.select("cpu")
    with accel.distributed() as world:
        found = {scenario: globals()[scenario](accel, folder) for scenario in scenarios}
        (folder / f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

"""One rank of a job that reads data: `data_ranks.py FOLDER`. Each writes what it found to FOLDER/RANK.json."""

from __future__ import annotations

import json
import logging
import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler

import accelcore
from accelcore import ShardedStream


class Rows(IterableDataset):
    """Rows that every reader reads alike, in an order that depends on the epoch."""

    def __init__(self, count, *, shuffled=False):
        self.count, self.shuffled, self.epoch = count, shuffled, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(self.count))
        if self.shuffled:
            random.Random(self.epoch).shuffle(order)
        return iter(order)


class Drawn(Dataset):
    """What a worker draws at random for a row."""

    def __len__(self):
        return 12

    def __getitem__(self, row):
        return row, torch.rand(()).item(), random.random(), float(np.random.rand())


class Files:
    """A loader that is none of torch's, and wants to know the epoch."""

    def __init__(self):
        self.told = []

    def set_epoch(self, epoch):
        self.told.append(epoch)

    def __iter__(self):
        return iter([torch.tensor([number]) for number in range(4)])

    def __len__(self):
        return 4


class Told(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        line = record.getMessage()
        if "the optimizers' kernels" not in line:  # the first run on a machine does
            self.lines.append(line)


def make(accel):
    model = nn.Linear(1, 1)
    return accel.trainer(model, accel.optimizers.create("sgd", model.parameters()), parallel="ddp")


def read(batches):
    return [row for batch in batches for row in batch.tolist()]


def shares(accel, job, told):
    """Rows of each loader, two epochs of it, and how many batches it has and said to have."""
    loaders = {
        "uneven": DataLoader(range(20), 4),
        "uneven, dropping": DataLoader(range(20), 4, drop_last=True),
        "stream": DataLoader(Rows(14), 2),
        "stream, dropping": DataLoader(Rows(14), 2, drop_last=True),
        "short stream": DataLoader(Rows(3), 2),
        "list": [torch.tensor([number]) for number in range(7)],
        "sharded": DataLoader(ShardedStream(Rows(14, shuffled=True)), 2, num_workers=2),
        "sharded, dropping": DataLoader(ShardedStream(Rows(14)), 2, drop_last=True),
        "sharded by hand": DataLoader(ShardedStream(Rows(14), rank=job.rank, world_size=job.world_size), 2),
    }
    found = {}
    for name, loader in loaders.items():
        trainer, epochs = make(accel), []
        for _ in range(2):
            batches = list(trainer.batches(loader))
            epochs.append([row for batch in batches for row in batch.tolist()])
        try:
            length = len(trainer.batches(loader))
        except TypeError:
            length = None
        found[name] = {"epochs": epochs, "batches": len(batches), "length": length}
    found["evaluated"] = {
        name: read(trainer.evaluate(loaders[name]))
        for name in ("uneven", "stream", "list", "sharded", "sharded, dropping")
    }
    own = WeightedRandomSampler(
        [0.0] * 50 + [1.0] * 50, 36 // job.world_size, generator=torch.Generator().manual_seed(job.rank)
    )
    found["weighted"] = read(make(accel).batches(DataLoader(range(100), 4, sampler=own), shard=False))
    found["whole"] = read(make(accel).batches(loaders["stream"], shard=False))
    assert all("without a step" in line for line in told.lines), told.lines
    return found


def refused(accel, job):
    class Own(DataLoader):
        pass

    found = {}
    for name, loader in {
        "class": Own(range(8), 2),
        "sampler": DataLoader(range(8), 2, sampler=[1, 2, 3]),
        "batch_sampler": DataLoader(range(8), batch_sampler=[[1, 2], [3]]),
        "no batches": DataLoader(range(8), batch_size=None),
        "weighted": DataLoader(range(8), 2, sampler=WeightedRandomSampler(torch.ones(8), 6)),
        "other place": DataLoader(range(8), 2, sampler=DistributedSampler(range(8), num_replicas=1, rank=0)),
        "other stream": DataLoader(ShardedStream(Rows(8), rank=0, world_size=2), 2),
    }.items():
        try:
            next(iter(make(accel).batches(loader)))
            found[name] = "not refused"
        except accelcore.ConfigurationError as error:
            found[name] = str(error)
    rows, size = range(8 + 4 * (job.rank == 1)), 2 + 2 * (job.rank == 1)
    loaders = DataLoader(rows, 2), DataLoader(range(8), size)
    for name, loader, shard in (
        ("rows", loaders[0], True),
        ("size", loaders[1], True),
        ("own rows", loaders[0], False),
    ):
        try:
            next(iter(make(accel).batches(loader, shard=shard)))
            found[name] = "not refused"
        except accelcore.DistributedError as error:
            found[name] = str(error)
    return found


def of_all_ranks(accel, told):
    """What the log reports of a schedule that is made for the batches of all ranks."""
    model, loader = nn.Linear(1, 1), DataLoader(range(24), 2)  # 4 batches for each of 3 ranks
    optimizer = accel.optimizers.create("sgd", model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * len(loader))
    trainer = accel.trainer(model, optimizer, scheduler=scheduler, parallel="ddp")
    told.lines.clear()
    trainer.epochs(2)
    next(iter(trainer.batches(loader)))
    return list(told.lines)


def drawn(accel, job):
    """All ranks are seeded alike; their workers are not."""
    torch.manual_seed(5)
    sampler = DistributedSampler(range(12), num_replicas=job.world_size, rank=job.rank, shuffle=False, seed=3)
    found = {}
    for name, loader in {
        "ours": DataLoader(Drawn(), 2, num_workers=2),
        "theirs": DataLoader(Drawn(), 2, num_workers=2, sampler=sampler),
    }.items():
        trainer = make(accel)
        torch.manual_seed(6)
        rows, *numbers = zip(*trainer.batches(loader), strict=True)
        found[name] = {"rows": torch.cat(rows).tolist(), "numbers": [torch.cat(each).tolist() for each in numbers]}
    found["seed"] = sampler.seed
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    told = Told()
    logging.getLogger("accelcore").addHandler(told)
    accel = accelcore.select("cpu")
    with accel.distributed() as job:
        files, trainer = Files(), make(accel)
        found = {
            "shares": shares(accel, job, told),
            "refused": refused(accel, job),
            "schedule": of_all_ranks(accel, told),
            "drawn": drawn(accel, job),
            "files": [read(trainer.batches(files)) for _ in range(2)],
            "told": files.told,
        }
        (folder / f"{job.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

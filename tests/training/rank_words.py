"""One rank of three that says what scripts say around the step: `rank_words.py FOLDER`.

test_rank_words.py starts it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SubsetRandomSampler

import accelcore


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(14.0))


def negative(job):
    """-2 on each rank; on rank 0 as a view of memory that holds 2."""
    return torch.tensor([-2.0]) if job.rank else torch.tensor([1 + 2j]).conj().imag


def words(job, folder):
    mine = torch.arange(10.0 * job.rank, 10.0 * job.rank + 2 * job.rank).reshape(job.rank, 2)
    matrix = torch.arange(6.0).reshape(2, 3)
    kinds = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
    found = {
        "is_main": job.is_main,
        "local_rank": job.local_rank,
        "rows": job.gather(mine).tolist(),
        "none": tuple(job.gather(mine[:0]).shape),
        "scalars": job.gather(torch.tensor(job.rank)).tolist(),
        "lists": job.gather([mine.bfloat16(), mine[:1].bfloat16()] if job.rank else []).tolist(),
        "listed scalars": job.gather([torch.tensor(number) for number in range(job.rank)]).tolist(),
        "kinds": [job.gather(torch.tensor([job.rank % 2]).to(kind)).real.tolist() for kind in kinds],
        "column of one row": job.gather(torch.tensor([[0.0, 1.0]])[:, 1]).tolist(),
        "columns": job.gather(torch.arange(6).reshape(2, 3).T + job.rank).tolist(),
        "number": job.mean(float(job.rank)),
        "tensor": job.mean(mine.new_full((2,), job.rank)).tolist(),
        "integers": job.mean(torch.tensor(job.rank)).item(),
        "half": job.mean(torch.tensor(6e4).half()).item(),
        "layouts": job.mean(matrix.T.contiguous().T if job.rank else matrix).tolist(),
        "complex": torch.view_as_real(job.mean(torch.tensor(1 + 2j * job.rank).conj())).tolist(),
        "views": [
            job.gather(negative(job)).tolist(),
            job.broadcast(negative(job)).tolist(),
            job.all_reduce(negative(job)).tolist(),
            torch.view_as_real(job.gather(torch.tensor(1 + 2j).conj())).tolist(),
        ],
    }
    try:
        job.gather(torch.zeros(2, 1 + job.rank))
    except accelcore.ConfigurationError as error:
        found["refused"] = str(error)
    found["refused lists"] = []
    one = job.rank == 1
    kinds_of_one = [torch.ones(1), torch.ones(1).half()], [torch.ones(1, 0), torch.ones(1, 1)]
    for rows in (
        [],
        *kinds_of_one,
        *([7.0], None, 0.0, (row for row in ()), "rows"),
        [] if one else torch.tensor([1, 2]),
        [torch.tensor(1)] if one else torch.tensor([1.0]),
    ):
        try:
            found["refused lists"].append(job.gather(rows).tolist())
        except accelcore.ConfigurationError as error:
            found["refused lists"].append(str(error).split("\n")[0])
    gathered = job.gather_objects({"rank": job.rank, 7: [("a", None), "é" * job.rank], "mine": mine.T.bfloat16()})
    found["objects"] = repr([{**entry, "mine": entry["mine"].tolist()} for entry in gathered])
    try:
        job.gather_objects([1, object()])
    except accelcore.ConfigurationError as error:
        found["no object"] = str(error)
    job.print("from the main rank", flush=True)
    with job.first():
        seen = (folder / "downloaded").exists()
        if not seen:
            (folder / "downloaded").touch()
    found["seen"] = seen
    try:
        with job.first():
            if job.rank == 0:
                raise OSError("no room")
    except OSError as error:
        found["failed"] = str(error)
    return found


def replicated(accel, job):
    """Gradients of a module alone, averaged in backward; it begins with those of rank 0."""
    torch.manual_seed(job.rank)
    module = nn.Linear(2, 1, bias=False)
    replica = accel.replicate(module)
    replica(torch.full((1, 2), float(job.rank))).sum().backward()
    return {"weight": module.weight.tolist(), "gradient": module.weight.grad.tolist()}


def evaluated(accel, trainer, loader):
    """The rows of this rank, how many batches there are, and how they said they would be."""
    rows = [row for batch in trainer.evaluate(loader) for row in batch.flatten().tolist()]
    return {"rows": rows, "length": len(trainer.evaluate(loader)), "batches": sum(1 for _ in trainer.evaluate(loader))}


def trained(accel, job):
    model = nn.Linear(1, 1)
    trainer = accel.trainer(model, accel.optimizers.create("sgd", model.parameters()), parallel="ddp")
    torch.manual_seed(40 + job.rank)
    data = torch.arange(20.0)
    loaders = {
        "plain": DataLoader(data, 4),
        "shuffled": DataLoader(data, 4, shuffle=True),
        "dropping": DataLoader(data, 6, drop_last=True),
        "distributed": DataLoader(data, 4, sampler=DistributedSampler(data)),
        "subset": DataLoader(data, 4, sampler=SubsetRandomSampler(range(0, 20, 2))),
        "stream": DataLoader(Stream(), 4),
        "list": list(data.split(4)),
        "few": DataLoader(data[:2], 1),
    }
    lengths = {}
    for name, loader in loaders.items():
        if name not in ("subset",):
            length = len(trainer.batches(loader)) if name != "stream" else None
            lengths[name] = [length, sum(1 for _ in trainer.batches(loader))]
    lone = trainer.batches(loaders["shuffled"]), trainer.evaluate(loaders["subset"])
    alone = list(map(len, lone)) if job.rank == 0 else None  # asks no other rank
    of_few = [model(batch[:, None]).flatten() for batch in trainer.evaluate(loaders["few"])]
    few = trainer.evaluate(loaders["few"])
    plain = trainer.evaluate(loaders["plain"])
    return {
        "means": [
            few.mean(lambda batch: {"rows": batch, "scalar": batch.mean()}),
            plain.mean(lambda batch: batch.square()),
            trainer.evaluate(loaders["list"][:3]).mean(lambda batch: batch.mean()),
        ],
        "errors": [len(of_few), len(job.gather(of_few))],
        "evaluated": {name: evaluated(accel, trainer, loader) for name, loader in loaders.items() if name != "stream"},
        "stream": [row for batch in trainer.evaluate(loaders["stream"]) for row in batch.tolist()],
        "lengths": lengths,
        "alone": alone,
    }


def main():
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    accel = accelcore.select("cpu")
    job = accel.join()
    found = {**words(job, folder), "replicated": replicated(accel, job), **trained(accel, job)}
    (folder / f"{job.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

"""One rank of a job that saves, or resumes, what ranks have divided: `pieces_ranks.py save|resume|die FOLDER ...`."""

from __future__ import annotations

import os
import signal
import sys
from collections import ChainMap
from pathlib import Path

import torch
import torch.distributed as dist

import accelcore
from accelcore import FSDP, Policy
from tests.training.parallel.fsdp_models import Block, Transformer, batch_of, loss_of

RUNS = {
    "ours": ("adamw", "fsdp", {}),
    "torch": ("torch", "fsdp", {}),
    "wrapped": ("sgd", FSDP(wrap=Block, reshard_after_forward=False), {}),
    "bf16": ("adamw", "zero3", {"precision": Policy(model_dtype="bfloat16")}),
    "whole": ("adamw", "ddp", {}),
    "state": ("adamw", "zero1", {}),
    "state of torch": ("torch", "zero1", {}),
}


def make(accel, run, seed, parallel=None, **more):
    torch.manual_seed(seed)
    model = Transformer()
    name, own, options = RUNS[run]
    if name == "torch":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    else:
        momentum = {"momentum": 0.9} if name == "sgd" else {"eps": 1e-3}
        optimizer = accel.optimizers.create(name, model.parameters(), lr=0.05, **momentum)
    if run == "bf16" and accel.collectives.world_size == 1:
        parallel = "none"
    return accel.trainer(model, optimizer, loss=loss_of, parallel=parallel or own, **{**options, **more})


def whole(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def weights(trainer):
    """The model, put together; every rank has to ask."""
    return {name: whole(value) for name, value in trainer.model.state_dict().items()}


def state(trainer):
    """Model and optimizer, put together; every rank has to ask."""
    model = weights(trainer)
    state = trainer.optimizer.state  # made when it is asked for
    held = {name: state[parameter] for name, parameter in trainer.model.named_parameters()}
    moments = {
        f"{name}.{key}": whole(value)
        for name, entry in held.items()
        for key, value in entry.items()
        if isinstance(value, torch.Tensor)
    }
    if all(held.values()):  # on every rank, or none
        return {"model": model, "moments": moments}
    every = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, moments)
    return {"model": model, "moments": dict(sorted(ChainMap(*every).items())), "own": len(moments)}


def save(accel, folder, rank):
    found = {}
    for run in RUNS:
        trainer = make(accel, run, seed=rank)
        for number in range(2):
            trainer(batch_of("transformer", rank, number))
        found[run] = state(trainer)
        path = trainer.save(folder / run)
        held = [file.stat().st_size for file in path.glob(f"*-{rank:05d}.safetensors")]
        found[run]["bytes"] = sum(held)
    return found


def resume(accel, folder, rank, parallel, *runs):
    found = {}
    for run in runs:
        trainer = make(accel, run, seed=rank + 11, parallel=parallel)
        trainer.resume(folder / run)
        found[run] = state(trainer)
        trainer(batch_of("transformer", rank, 3))
        found[run]["after"] = weights(trainer)
    return found


def die(accel, folder, rank, moment):
    """Rank 1 is killed when it flushes its `moment`-th file; rank 0 at what comes after all files."""
    trainer = make(accel, "ours", seed=rank)
    trainer(batch_of("transformer", rank, 0))
    trainer.save(folder)
    trainer(batch_of("transformer", rank, 1))
    flush, count = os.fsync, [0]

    def counted(descriptor):
        count[0] += 1
        if count[0] == abs(moment) and rank == (moment > 0):
            os.kill(os.getpid(), signal.SIGKILL)
        flush(descriptor)

    os.fsync = counted
    trainer.save(folder)


def main() -> None:
    what, folder, *rest = sys.argv[1:]
    torch.set_num_threads(1)
    accel = accelcore.select("cpu")
    with accel.distributed() as job:
        if what == "die":
            die(accel, Path(folder), job.rank, int(rest[0]))
            return
        do = save if what == "save" else resume
        found = do(accel, Path(folder), job.rank, *rest)
        torch.save(found, Path(folder, f"{what}-{'-'.join(map(str, rest))}-{job.world_size}-{job.rank}.pt"))


if __name__ == "__main__":
    main()

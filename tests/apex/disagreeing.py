"""A rank of a job: overflows on one rank only, unused parameters, ranks that begin apart, an optimizer left out."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from accelcore.apex import amp, optimizers
from accelcore.torch_internals import unlocked_destruction


def weights(model):
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def make(level, seed, **options):
    amp.reset()
    torch.manual_seed(seed)
    model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1)])
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.5)
    options = {"combine_ddp": True, "dynamic_init_scale": 64.0, "verbosity": 0, **options}
    return amp.initialize(model, optimizer, opt_level=level, **options)


def main(rank):
    found = {}
    x = torch.tensor([[1.0, 2.0]])
    for level in ("O1", "O2"):
        model, optimizer = make(level, seed=rank)
        found[f"{level} begin"] = weights(model)
        for step, used in enumerate(((0, 1), (rank,), (0,))):
            optimizer.zero_grad()
            loss = sum(model[n](x.to(model[n].weight.dtype)).sum() * (rank + 1) for n in used)
            with amp.scale_loss(loss * (math.inf if step == 0 and rank == 1 else 1.0), optimizer) as scaled:
                scaled.backward()
            model[2].running_mean.fill_(rank + step)
            optimizer.step()
            found[f"{level} step {step}"] = weights(model)
        found[f"{level} scale"] = amp.state_dict()["loss_scaler0"]["loss_scale"]
        found[f"{level} buffer"] = model[2].running_mean.item()
    model, optimizer = make("O1", seed=0)
    optimizer.combine_ddp = False
    with amp.scale_loss(model[0](x).sum() * (rank + 1), optimizer) as scaled:
        scaled.backward()
    found["left out"] = model[0].weight.grad.flatten().tolist()
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Path(sys.argv[1], f"rank-{os.environ['RANK']}.json").write_text(json.dumps(main(dist.get_rank())))
    with unlocked_destruction():  # torch 2.7 may wait forever without it
        dist.destroy_process_group()

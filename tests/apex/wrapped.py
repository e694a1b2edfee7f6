"""A rank of a job, in apex's DistributedDataParallel: buffers that differ, and an evaluation by rank 0 alone."""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from accelcore.apex.parallel import DistributedDataParallel
from accelcore.torch_internals import unlocked_destruction


def main(rank):
    torch.manual_seed(rank)
    layer = nn.utils.spectral_norm(nn.Linear(2, 2, bias=False))
    vector = layer.weight_u.tolist()
    model = nn.Sequential(nn.BatchNorm1d(2, momentum=1.0), layer)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ddp = DistributedDataParallel(model)
    found = {"warnings": [str(each.message) for each in warned], "kept": layer.weight_u.tolist() == vector}
    found["weight"] = layer.weight_orig.tolist()
    batch = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (rank + 1)
    for _ in range(2):
        ddp(batch).square().sum().backward()
    found["mean"] = model[0].running_mean.tolist()
    found["gradient"] = layer.weight_orig.grad.tolist()
    ddp.eval()
    if rank == 0:
        with torch.no_grad():
            found["evaluated"] = ddp(batch).tolist()
            found["directly"] = model(batch).tolist()
    dist.barrier()
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    Path(sys.argv[1], f"rank-{os.environ['RANK']}.json").write_text(json.dumps(main(dist.get_rank())))
    with unlocked_destruction():  # torch 2.7 may wait forever without it
        dist.destroy_process_group()

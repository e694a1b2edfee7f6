"""One rank of a job on parts that saturate: rank 1 overflows, its gradients stay finite. Writes JSON."""

import json
import sys
from pathlib import Path

import torch
from torch import nn

import accelcore


def overflow(accel):
    """An operator that clamps its result and raises the device's flag."""
    torch.full((2,), 6e4, device=accel.device, dtype=torch.float16) * 6e4


def step(accel, scaler, optimizer, weight, *, overflows):
    optimizer.zero_grad()
    scaler.scale(weight.mean()).backward()
    if overflows:
        overflow(accel)
    scaler.step(optimizer)
    scaler.update()
    finite = bool(weight.grad.isfinite().all())
    return {"finite": finite, "weight": weight[0].item(), "scale": scaler.state_dict()["scale"]}


def clipped(accel, precision):
    """How far two clipped steps go, where an operator overflowed before each."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=1.0)
    trainer = accel.trainer(
        model, optimizer, loss=lambda model, batch: model(batch).float().sum(), precision=precision, clip_norm=1.0,
        loss_scale=128.0 if precision == "fp16" else None, parallel="ddp",
    )  # fmt: skip
    lengths = []
    for _ in range(2):
        overflow(accel)
        before = model.weight.detach().clone()
        trainer(torch.full((2, 4), 8.0, device=accel.device))
        lengths.append((model.weight.detach() - before).norm().item())
    return lengths


def main():
    accel = accelcore.select("npu")
    able = accel.capabilities
    found = {"declared": [able.overflow_flag, able.fast_fp32, able.autocast_dtypes, able.model_dtypes]}
    with accel.distributed() as collectives:
        weight = nn.Parameter(torch.ones(2, device=accel.device))
        optimizer = accel.optimizers.create("sgd", [weight], lr=0.5)
        scaler = accel.scaler.create(init=1024.0)
        found["skipped"] = step(accel, scaler, optimizer, weight, overflows=collectives.rank == 1)
        found["after"] = step(accel, scaler, optimizer, weight, overflows=False)
        overflow(accel)  # of evaluation, say, between two windows
        found["before"] = step(accel, scaler, optimizer, weight, overflows=False)
        found["clipped"] = {precision: clipped(accel, precision) for precision in ("fp32", "fp16")}
        Path(sys.argv[1], f"rank-{collectives.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

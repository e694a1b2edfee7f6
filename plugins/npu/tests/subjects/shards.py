"""One rank of a job on NPUs that divides its model. Writes what it finds as JSON."""

import json
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

import accelcore
from accelcore import FSDP, Policy

warnings.filterwarnings("error", "CAUTION")  # torch_npu's, where an operator falls back to the CPU
ROWS, STEPS = 8, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, rows):
        return rows + self.outer(torch.tanh(self.inner(self.norm(rows))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(6, 1)
        self.unused = nn.Linear(3, 3)

    def forward(self, rows):
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows)


def made():
    torch.manual_seed(0)
    return Net()


def rows_of(rank, step):
    return torch.randn(2 * ROWS, 6, generator=torch.Generator().manual_seed(step))[rank::2]


def loss(model, rows):
    return (model(rows).float() - 1).square().mean()


def whole(model):
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value)
        .detach()
        .float()
        .cpu()
        .flatten()
        .tolist()
        for name, value in model.state_dict().items()
    }


def train(accel, rank, *, optimizer="adamw", steps=STEPS, resume=None, **options):
    model = made()
    if optimizer == "torch":
        own = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3, foreach=False)
    else:
        own = accel.optimizers.create(optimizer, model.parameters(), lr=0.05, eps=1e-3)
    trainer = accel.trainer(model, own, loss=loss, **{"parallel": "fsdp", **options})
    if resume is not None:
        trainer.resume(resume)
    for step in range(trainer.steps, steps):
        trainer(accel.runtime.to_device(rows_of(rank, step)))
    return trainer


def statistics(accel, rank):
    """A BatchNorm that sees the rows of both ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4), nn.Linear(4, 1))
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=0.05, eps=1e-3)
    trainer = accel.trainer(model, optimizer, loss=loss, parallel="ddp")
    for step in range(STEPS):
        trainer(accel.runtime.to_device(rows_of(rank, step)))
    return whole(model)


def main():
    folder = Path(sys.argv[1])
    accel = accelcore.select("npu")
    with accel.distributed() as job:
        rank, found = job.rank, {"rank": job.rank, "emulated": accel.emulated}
        first = train(accel, rank)
        found["route"] = first.optimizer.route
        found["held"] = sum(parameter.to_local().numel() for parameter in first.model.parameters())
        found["where"] = sorted({str(parameter.to_local().device) for parameter in first.model.parameters()})
        found["fsdp"] = whole(first.model)
        found["torch"] = whole(train(accel, rank, optimizer="torch").model)
        found["zero2"] = whole(train(accel, rank, parallel="zero2").model)
        found["anew"] = whole(train(accel, rank, checkpoint=Block).model)
        found["away"] = whole(train(accel, rank, checkpoint=Block, offload=Block).model)
        found["offloaded"] = whole(train(accel, rank, parallel=FSDP(cpu_offload=True)).model)
        found["clipped"] = whole(train(accel, rank, clip_norm=0.1, loss_scale="dynamic").model)
        found["bf16"] = whole(train(accel, rank, precision=Policy(model_dtype="bfloat16", autocast="bfloat16")).model)
        found["statistics"] = statistics(accel, rank)
        train(accel, rank, steps=3).save(folder / "saved")
        found["resumed"] = whole(train(accel, rank, resume=folder / "saved").model)
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

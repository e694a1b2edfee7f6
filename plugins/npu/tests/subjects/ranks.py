"""One rank of a job on NPUs: its place, its groups, and how it trains. Writes what it finds as JSON."""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import accelcore

warnings.filterwarnings("error", "CAUTION")  # torch_npu's, where an operator falls back to the CPU
# The group that `adopted` is given names no device.
warnings.filterwarnings("ignore", r"barrier\(\): using the device|No device id is provided", UserWarning)

ROWS, STEPS = 8, 10


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def data(collectives, step):
    """This rank's rows of a batch."""
    inputs = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(step))
    mine = slice(collectives.rank, None, collectives.world_size)
    return inputs[mine], inputs.sum(1, keepdim=True)[mine]


def loss(module, batch):
    inputs, targets = batch
    return (module(inputs) - targets).square().mean()


def train(accel, collectives, parallel="ddp", **options):
    module = model()
    optimizer = accel.optimizers.create("adamw", module.parameters(), lr=0.05)
    trainer = accel.trainer(module, optimizer, loss=loss, parallel=parallel, **options)
    losses = []
    for step in range(STEPS):
        value = trainer(accel.runtime.to_device(data(collectives, step)))
        losses.append(collectives.all_reduce(value.clone(), "avg").item())
    devices = sorted({str(parameter.device) for parameter in module.parameters()})
    values = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    return {"losses": losses, "devices": devices, "values": values.tolist(), "skipped": trainer.skipped}


def train_sharded(accel, collectives):
    module = model().to(accel.device)
    fully_shard(module)
    optimizer = accel.optimizers.create("adamw", module.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        value = loss(module, accel.runtime.to_device(data(collectives, step)))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(collectives.all_reduce(value.detach().clone(), "avg").item())
    local = sum(parameter.to_local().numel() for parameter in module.parameters())
    whole = sum(parameter.numel() for parameter in module.parameters())
    return {"losses": losses, "route": optimizer.route, "local": local, "whole": whole}


def adopted(accel, folder, rank, world_size):
    """A group that the script formed for hccl alone."""
    dist.init_process_group("hccl", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    with accel.distributed() as collectives:
        host = torch.tensor([collectives.rank])
        dist.all_reduce(host, group=collectives.cpu_group())
        device = collectives.all_reduce(torch.tensor([1.0], device=accel.device)).tolist()
        backend = dist.get_backend(collectives.cpu_group())
    still = dist.is_initialized()
    dist.destroy_process_group()
    return {"host": host.tolist(), "device": device, "backend": backend, "still": still}


def main():
    accel = accelcore.select("npu")
    found = {"emulated": accel.emulated, "index": accel.index}
    with accel.distributed() as collectives:
        found |= {"rank": collectives.rank, "current": torch.npu.current_device()}
        found["config"] = str(dist.get_backend_config())
        host = torch.tensor([collectives.rank])
        dist.all_reduce(host, group=collectives.cpu_group())
        found["group"] = host.tolist()
        found["accumulated"] = train(accel, collectives, accumulate=2, clip_norm=0.5)
        found["bf16"] = train(accel, collectives, precision="bf16")
        found["fp16"] = train(accel, collectives, precision="fp16", accumulate=2, clip_norm=1.0)
        found["combined fp16"] = train(accel, collectives, "combine_ddp", precision="fp16", comm_dtype="float16")
        found["sharded"] = train_sharded(accel, collectives)
        place = collectives.rank, collectives.world_size
    found["left"] = not dist.is_initialized()
    found["adopted"] = adopted(accel, sys.argv[1], *place)
    Path(sys.argv[1], f"rank-{found['rank']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

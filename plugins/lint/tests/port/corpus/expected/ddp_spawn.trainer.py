import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import accelcore

current_device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.setdefault("MASTER_PORT", "29513")
    dist.init_process_group(torch.distributed.get_default_backend_for_device(current_device), rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 6, generator=generator).to(current_device) for _ in range(3)]


def demo(rank, world_size):
    setup(rank, world_size)
    torch.manual_seed(0)
    accel = accelcore.select(local_rank=rank)

    # create model and move it to GPU with id rank
    model = nn.Linear(6, 2).to(accel.device)
    ddp_model = accel.replicate(model)
    optimizer = accel.optimizers.create("sgd", ddp_model.parameters(), lr=0.01)

    for batch in batches(rank):
        optimizer.zero_grad()
        loss = ddp_model(batch).square().mean()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print("loss", loss.item())
            sys.stdout.flush()
    cleanup()


if __name__ == "__main__":
    world_size = 2
    mp.spawn(demo, args=(world_size,), nprocs=world_size, join=True)

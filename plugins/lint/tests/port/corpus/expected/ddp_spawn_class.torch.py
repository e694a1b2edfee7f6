import argparse
import os

import torch
import torch.multiprocessing as mp
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.setdefault("MASTER_PORT", "29517")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(rank)
    init_process_group(torch.distributed.get_default_backend_for_device(device), rank=rank, world_size=world_size)


class Learner:
    def __init__(self, model, batches, gpu, every=2):
        self.gpu = gpu
        self.batches = batches
        self.every = every
        self.model = DDP(model.to(torch.device(device.type, gpu)), device_ids=[gpu] if torch.accelerator.is_available() else None)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def learn(self):
        for step, batch in enumerate(self.batches):
            batch = batch.to(torch.device(device.type, self.gpu))
            loss = self.model(batch).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if self.gpu == 0:
                print("loss", loss.item(), flush=True)
            if self.gpu == 0 and step % self.every == 0:
                torch.save(self.model.module.state_dict(), os.devnull)


def work(rank, world_size, steps):
    setup(rank, world_size)  # one process a GPU
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 2)
    torch.manual_seed(rank + 1)
    batches = [torch.randn(4, 6) for _ in range(steps)]
    Learner(model, batches, rank).learn()
    destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=torch.get_device_module(torch.accelerator.current_accelerator()).device_count() if torch.accelerator.current_accelerator() else 0)
    args = parser.parse_args()
    mp.spawn(work, args=(args.ranks, args.steps), nprocs=args.ranks)

import os

import torch
from torch import nn
from torch.distributed import destroy_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import accelcore

if __name__ != "__mp_main__":
    accel = accelcore.select()


def ddp_setup():
    accel.join()


class Trainer:
    def __init__(self, model, data, optimizer):
        self.gpu_id = int(os.environ["LOCAL_RANK"])
        self.model = model.to(accel.device)
        self.data = data
        self.optimizer = optimizer
        self.model = DDP(self.model, device_ids=[accel.device] if accel.device.type != "cpu" else None)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = nn.functional.mse_loss(output, targets)
        loss.backward()
        self.optimizer.step()
        print("loss", loss.item())

    def _run_epoch(self, epoch):
        self.data.sampler.set_epoch(epoch)
        for source, targets in self.data:
            source = source.to(accel.device)
            targets = targets.to(accel.device)
            self._run_batch(source, targets)

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)
            if self.gpu_id == 0:
                state = self.model.module.state_dict()
                assert set(state) == {"weight", "bias"}


def main():
    ddp_setup()
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(32, 5), torch.randn(32, 1))
    loader = DataLoader(data, batch_size=8, **accel.loading(), shuffle=False, sampler=DistributedSampler(data))
    model = nn.Linear(5, 1)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=1e-2)
    Trainer(model, loader, optimizer).train(2)
    destroy_process_group()


if __name__ == "__main__":
    main()

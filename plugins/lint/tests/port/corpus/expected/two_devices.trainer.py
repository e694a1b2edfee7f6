"""Model parallelism by hand: which device is which cannot be guessed."""
import torch
from torch import nn


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        # TODO(accelcore): device index 0: a process has one device here, which ACCEL_DEVICE or the launcher chooses
        self.first = nn.Linear(4, 8).to("cuda:0")
        # TODO(accelcore): device index 1: a process has one device here, which ACCEL_DEVICE or the launcher chooses
        self.second = nn.Linear(8, 1).to("cuda:1")

    def forward(self, x):
        # TODO(accelcore): device index 0: a process has one device here, which ACCEL_DEVICE or the launcher chooses
        # TODO(accelcore): device index 1: a process has one device here, which ACCEL_DEVICE or the launcher chooses
        return self.second(torch.relu(self.first(x.to("cuda:0"))).to("cuda:1"))


def main(gpu=None):
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(gpu or 1)
    model = TwoParts()
    # TODO(accelcore): a type of tensor of one device: write torch.zeros(..., device=...) or .to(device, dtype)
    weights = model.second.weight.type(torch.cuda.FloatTensor)
    # TODO(accelcore): a device's name in a place where it is not certain that it chooses a device
    choices = ["cuda", "cpu"]
    return model, weights, choices

"""Model parallelism by hand: which device is which cannot be guessed."""
import torch
from torch import nn


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        current_device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        self.first = nn.Linear(4, 8).to(torch.device(current_device.type, 0))
        self.second = nn.Linear(8, 1).to(torch.device(current_device.type, 1))

    def forward(self, x):
        current_device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        return self.second(torch.relu(self.first(x.to(torch.device(current_device.type, 0)))).to(torch.device(current_device.type, 1)))


def main(gpu=None):
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(gpu or 1)
    model = TwoParts()
    # TODO(accelcore): a type of tensor of one device: write torch.zeros(..., device=...) or .to(device, dtype)
    weights = model.second.weight.type(torch.cuda.FloatTensor)
    # TODO(accelcore): a device's name in a place where it is not certain that it chooses a device
    choices = ["cuda", "cpu"]
    return model, weights, choices

"""Model parallelism by hand: which device is which cannot be guessed."""
import torch
from torch import nn


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8).to("cuda:0")
        self.second = nn.Linear(8, 1).to("cuda:1")

    def forward(self, x):
        return self.second(torch.relu(self.first(x.to("cuda:0"))).to("cuda:1"))


def main(gpu=None):
    torch.cuda.set_device(gpu or 1)
    model = TwoParts()
    weights = model.second.weight.type(torch.cuda.FloatTensor)
    choices = ["cuda", "cpu"]
    return model, weights, choices

import argparse

import torch
from torch import nn

try:
    # TODO(accelcore): apex: level roles has accelcore.apex
    from apex import amp
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.")

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", type=str, default="O0")
parser.add_argument("--loss-scale", type=float, default=None)
args = parser.parse_args()

torch.manual_seed(2)
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
# TODO(accelcore): mixed precision of one vendor: torch.autocast and torch.amp.GradScaler take the device's type
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, loss_scale=args.loss_scale)
criterion = nn.CrossEntropyLoss()

for step in range(4):
    inputs = torch.randn(16, 8).to(device)
    labels = torch.randint(4, (16,)).to(device)
    loss = criterion(model(inputs), labels)
    optimizer.zero_grad()
    # TODO(accelcore): mixed precision of one vendor: torch.autocast and torch.amp.GradScaler take the device's type
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    # TODO(accelcore): mixed precision of one vendor: torch.autocast and torch.amp.GradScaler take the device's type
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    print("loss", loss.item())

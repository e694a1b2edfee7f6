import contextlib

import torch
from torch import nn
import accelcore

accel = accelcore.select()

device = accel.device
torch.manual_seed(0)
model = nn.Linear(3, 1).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=device.type != "cpu")
context = accel.autocast(torch.bfloat16) if device.type != "cpu" else contextlib.nullcontext()

for step in range(3):
    x = torch.ones(4, 3)
    if device.type != "cpu":
        x = x.pin_memory().to(device, non_blocking=True)
    else:
        x = x.to(device)
    with context:
        loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if loss.device.type != "cpu":
        accel.runtime.synchronize()
    if device.type != "cpu":
        print(torch.get_device_module(accel.device).get_device_name())
    print("loss", loss.item())

import contextlib

import torch
from torch import nn

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
torch.manual_seed(0)
model = nn.Linear(3, 1).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=device.type != "cpu")
accelerator = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
context = torch.autocast(accelerator.type, dtype=torch.bfloat16) if device.type != "cpu" else contextlib.nullcontext()

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
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
    # TODO(accelcore): a condition on one vendor's device: other accelerators answer it as the CPU does
    if device.type == "cuda":
        # TODO(accelcore): the name of the device: torch has no generic function
        print(torch.cuda.get_device_name())
    print("loss", loss.item())

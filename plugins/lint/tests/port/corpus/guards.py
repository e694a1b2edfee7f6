import contextlib

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = nn.Linear(3, 1).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=device.type == "cuda")
context = torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()

for step in range(3):
    x = torch.ones(4, 3)
    if device.type == "cuda":
        x = x.pin_memory().to(device, non_blocking=True)
    else:
        x = x.to(device)
    with context:
        loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if loss.is_cuda:
        torch.cuda.synchronize()
    if device.type == "cuda":
        print(torch.cuda.get_device_name())
    print("loss", loss.item())

import time

import torch
from torch import nn
import accelcore

torch.manual_seed(0)
if hasattr(torch.get_device_module(), "reset_peak_memory_stats"):
    torch.get_device_module().reset_peak_memory_stats()
accel = accelcore.select()
layer = nn.Linear(32, 32).to(accel.device)
optimizer = accel.optimizers.create("sgd", layer.parameters(), lr=0.1)
timers = []
for _ in range(3):
    accel.runtime.synchronize()
    start = time.perf_counter()
    with accel.autocast(torch.float16, enabled=False):
        loss = layer(torch.randn(8, 32, device=accel.device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    timers.append(time.perf_counter() - start)
    print("loss", loss.item())
peak = getattr(torch.get_device_module(), "max_memory_allocated", lambda: 0)() / 2**20
print("peak", peak >= 0)
if peak > 1e9:
    start_event = torch.Event(enable_timing=True)
    stream = torch.get_device_module().Stream()

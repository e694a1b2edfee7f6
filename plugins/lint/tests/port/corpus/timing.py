import time

import torch
import torch.cuda.amp as amp
from torch import nn, cuda

torch.manual_seed(0)
cuda.reset_peak_memory_stats()
layer = nn.Linear(32, 32).cuda()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
timers = []
for _ in range(3):
    cuda.synchronize()
    start = time.perf_counter()
    with amp.autocast(enabled=False):
        loss = layer(torch.randn(8, 32, device=torch.device("cuda"))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    timers.append(time.perf_counter() - start)
    print("loss", loss.item())
peak = torch.cuda.max_memory_allocated() / 2**20
print("peak", peak >= 0)
if peak > 1e9:
    start_event = torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.Stream()

import torch
import torch_npu
from torch import nn
from torch_npu.optim import NpuFusedAdamW, NpuFusedLamb

torch.npu.set_device(0)
torch.manual_seed(5)
torch.npu.manual_seed(5)

model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).npu()
head = nn.Linear(3, 1).to("npu:0")
optimizer = NpuFusedAdamW(model.parameters(), lr=1e-2, weight_decay=0.05)
other = NpuFusedLamb(head.parameters(), lr=1e-2)

for step in range(4):
    x = torch.randn(8, 6).npu()  # a batch
    loss = head(model(x)).square().mean()
    optimizer.zero_grad()
    other.zero_grad()
    loss.backward()
    optimizer.step()
    other.step()
    print("loss", loss.item())
torch.npu.synchronize()

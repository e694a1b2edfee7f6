import torch
from torch import nn
# TODO(accelcore): torch_npu.optim: one vendor's module
from torch_npu.optim import NpuFusedLamb

if torch.accelerator.is_available():
    torch.accelerator.set_device_index(0)
torch.manual_seed(5)

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).to(device)
head = nn.Linear(3, 1).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)
# TODO(accelcore): NpuFusedLamb: torch has no such optimizer; level roles has
other = NpuFusedLamb(head.parameters(), lr=1e-2)

for step in range(4):
    x = torch.randn(8, 6).to(device)  # a batch
    loss = head(model(x)).square().mean()
    optimizer.zero_grad()
    other.zero_grad()
    loss.backward()
    optimizer.step()
    other.step()
    print("loss", loss.item())
if torch.accelerator.is_available():
    torch.accelerator.synchronize()

import torch
from torch import nn
# cuda means npu from here on

torch.manual_seed(0)
if torch.accelerator.is_available():
    torch.accelerator.set_device_index(0)
data = [(torch.randn(8, 8), torch.randn(8, 1)) for _ in range(4)]
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for x, y in data:
    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("loss", loss.item())

import torch
import torch_npu
from torch import nn
from torch_npu.contrib import transfer_to_npu  # cuda means npu from here on

torch.manual_seed(0)
torch.cuda.set_device(0)
data = [(torch.randn(8, 8), torch.randn(8, 1)) for _ in range(4)]
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for x, y in data:
    x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("loss", loss.item())

import torch
from torch import nn
import accelcore

accel = accelcore.select()

torch.manual_seed(5)

model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).to(accel.device)
head = nn.Linear(3, 1).to(accel.device)
optimizer = accel.optimizers.create("adamw", model.parameters(), lr=1e-2, weight_decay=0.05)
other = accel.optimizers.create("lamb", head.parameters(), lr=1e-2)

for step in range(4):
    x = torch.randn(8, 6).to(accel.device)  # a batch
    loss = head(model(x)).square().mean()
    optimizer.zero_grad()
    other.zero_grad()
    loss.backward()
    optimizer.step()
    other.step()
    print("loss", loss.item())
accel.runtime.synchronize()

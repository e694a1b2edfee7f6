import torch
from torch import nn
# cuda means npu from here on
import accelcore

torch.manual_seed(0)
accel = accelcore.select()
data = [(torch.randn(8, 8), torch.randn(8, 1)) for _ in range(4)]
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(accel.device)
optimizer = accel.optimizers.create("adamw", model.parameters(), lr=1e-2)
trainer = accel.trainer(model, optimizer)

for x, y in trainer.batches(data):
    x, y = x.to(accel.device, non_blocking=True), y.to(accel.device, non_blocking=True)
    loss = nn.functional.mse_loss(trainer.forward(x), y)
    trainer.backward(loss)
    trainer.update()
    print("loss", loss.item())

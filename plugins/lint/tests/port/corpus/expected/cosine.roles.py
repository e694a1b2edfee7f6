import math
import os
import tempfile

import torch as th
import torch.nn as nn
from torch.optim.lr_scheduler import CosineAnnealingLR
import accelcore

accel = accelcore.select()

DEVICE = accel.device.type

th.manual_seed(0)
model = nn.Linear(4, 4).to(DEVICE)
optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.5, momentum=0.9, nesterov=True)
scheduler = CosineAnnealingLR(optimizer, T_max=6)
batches = th.randn(3, 8, 4, device=DEVICE)

for epoch in range(2):
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        print("loss", loss.item())

assert math.isfinite(loss.item())
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "model.pt")
    th.save(model.state_dict(), path)
    model.load_state_dict(th.load(path, map_location=DEVICE, weights_only=True))

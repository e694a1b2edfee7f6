import torch
from torch import nn
import accelcore

torch.manual_seed(7)
use_amp = False

accel = accelcore.select()

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(accel.device)
optimizer = accel.optimizers.create("adamw", model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler(accel.device.type, init_scale=1024.0, enabled=use_amp)
batches = [(torch.randn(16, 8), torch.randn(16, 1)) for _ in range(4)]

for x, y in batches:
    x, y = x.to(accel.device), y.to(accel.device)
    with accel.autocast(torch.float16, enabled=use_amp):
        loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    # gradients are clipped unscaled
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print("loss", loss.item())

state = {"model": model.state_dict(), "scaler": scaler.state_dict()}
scaler.load_state_dict(state["scaler"])

import torch
from torch import nn

torch.manual_seed(7)
use_amp = False

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, enabled=device.type != "cpu" and use_amp)
batches = [(torch.randn(16, 8), torch.randn(16, 1)) for _ in range(4)]

for x, y in batches:
    x, y = x.to(device), y.to(device)
    with torch.autocast(device.type, dtype=torch.float16, enabled=device.type != "cpu" and use_amp):
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

import os
from contextlib import nullcontext

import torch
import accelcore

accel = accelcore.select()

# -----------------------------------------------------------------------------
backend = torch.distributed.get_default_backend_for_device(accel.device) # 'nccl', 'gloo', etc.
device = accel.device.type # examples: 'cpu', 'cuda', 'cuda:0'
dtype = 'bfloat16' if accel.device.type != "cpu" and "bfloat16" in accel.capabilities.autocast_dtypes else 'float32'
# -----------------------------------------------------------------------------
ddp = int(os.environ.get('RANK', -1)) != -1 and int(os.environ.get('WORLD_SIZE', 1)) > 1
if ddp:
    torch.distributed.init_process_group(backend=backend)
    device = str(accel.device)
torch.manual_seed(1337)
torch.set_float32_matmul_precision("high") # allow tf32 on matmul
device_type = accel.device.type if "cpu" not in device else 'cpu' # for later use in torch.autocast
ptdtype = {'float32': torch.float32, 'bfloat16': torch.bfloat16}[dtype]
ctx = nullcontext() if device_type == 'cpu' or dtype == 'float32' else torch.amp.autocast(device_type=device_type, dtype=ptdtype)

tokens = torch.randint(16, (40,))


def get_batch():
    ix = torch.randint(30, (4,))
    x = torch.stack([tokens[i:i + 8] for i in ix])
    y = torch.stack([tokens[i + 1:i + 9] for i in ix])
    if device_type != "cpu":
        # pin arrays x,y, which allows us to move them to GPU asynchronously
        x, y = x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    else:
        x, y = x.to(device), y.to(device)
    return x, y


model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))
model.to(device)
scaler = accel.scaler.create() if dtype == 'float16' else accel.scaler.none()
optimizer = accel.optimizers.create("adamw", model.parameters(), lr=1e-2, betas=(0.9, 0.95))
if ddp:
    model = accel.replicate(model)

for iter_num in range(3):
    for micro_step in range(2):
        X, Y = get_batch()
        with ctx:
            logits = model(X)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), Y.flatten()) / 2
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print("loss", loss.item())

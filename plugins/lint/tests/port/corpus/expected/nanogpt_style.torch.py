import os
from contextlib import nullcontext

import torch

accelerator = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

# -----------------------------------------------------------------------------
backend = torch.distributed.get_default_backend_for_device(accelerator) # 'nccl', 'gloo', etc.
device = accelerator.type # examples: 'cpu', 'cuda', 'cuda:0'
# TODO(accelcore): whether one vendor's devices compute in bfloat16: torch has no generic question
# TODO(accelcore): a condition on one vendor's device: what it guards is left
dtype = 'bfloat16' if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else 'float32'
# -----------------------------------------------------------------------------
ddp = int(os.environ.get('RANK', -1)) != -1 and int(os.environ.get('WORLD_SIZE', 1)) > 1
if ddp:
    torch.distributed.init_process_group(backend=backend)
    ddp_local_rank = int(os.environ['LOCAL_RANK'])
    device = f"{accelerator.type}:{ddp_local_rank}"
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(device)
torch.manual_seed(1337)
torch.set_float32_matmul_precision("high") # allow tf32 on matmul
device_type = accelerator.type if "cpu" not in device else 'cpu' # for later use in torch.autocast
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
scaler = torch.amp.GradScaler(accelerator.type, enabled=accelerator.type != "cpu" and dtype == 'float16')
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
if ddp:
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[ddp_local_rank] if torch.accelerator.is_available() else None)

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

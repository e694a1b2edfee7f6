import argparse
import os

import torch
import torch.nn as nn
# TODO(accelcore): apex: one vendor's module
import apex
# TODO(accelcore): apex: level roles has accelcore.apex
from apex import amp
# TODO(accelcore): apex: level roles has accelcore.apex
from apex.parallel import DistributedDataParallel as DDP
# TODO(accelcore): apex: level roles has accelcore.apex
from apex.optimizers import FusedAdam

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=0, type=int)
parser.add_argument("--sync_bn", action="store_true")
args = parser.parse_args()
args.distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

if args.distributed:
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(args.local_rank)
    torch.distributed.init_process_group(backend=torch.distributed.get_default_backend_for_device(device), init_method="env://")

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
if args.sync_bn:
    # TODO(accelcore): apex's own: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) is for all devices
    model = apex.parallel.convert_syncbn_model(model)
model = model.to(device)
# TODO(accelcore): apex's own: torch.optim.AdamW(..., fused=True) is for all devices
optimizer = FusedAdam(model.parameters(), lr=1e-2)
# TODO(accelcore): mixed precision of one vendor: torch.autocast and torch.amp.GradScaler take the device's type
model, optimizer = amp.initialize(model, optimizer, opt_level="O0")
if args.distributed:
    # TODO(accelcore): apex's own: torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    model = DDP(model, delay_allreduce=True)

for _ in range(3):
    x = torch.randn(8, 4, device=device)
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    # TODO(accelcore): mixed precision of one vendor: torch.autocast and torch.amp.GradScaler take the device's type
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    print("loss", loss.item())

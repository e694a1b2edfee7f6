import argparse
import os

import torch
import torch.nn as nn
from accelcore import apex
from accelcore.apex import amp
from accelcore.apex.parallel import DistributedDataParallel as DDP
from accelcore.apex.optimizers import FusedAdam
import accelcore

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=0, type=int)
parser.add_argument("--sync_bn", action="store_true")
args = parser.parse_args()
args.distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1

accel = accelcore.select()

if args.distributed:
    accel.join()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
if args.sync_bn:
    model = apex.parallel.convert_syncbn_model(model)
model = model.to(accel.device)
optimizer = FusedAdam(model.parameters(), lr=1e-2)
model, optimizer = amp.initialize(model, optimizer, opt_level="O0")
if args.distributed:
    model = DDP(model, delay_allreduce=True)

for _ in range(3):
    x = torch.randn(8, 4, device=accel.device)
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    print("loss", loss.item())

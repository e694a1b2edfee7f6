"""A small ResNet, trained as scripts for Ascend's apex train one, on one rank or several."""

import argparse
import json
import os
import sys

import torch
import torch.distributed as dist
from apex import amp
from apex.optimizers import NpuFusedSGD
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, planes):
        super().__init__()
        self.conv1 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + x)


class ResNet(nn.Module):
    def __init__(self, planes=4, classes=3):
        super().__init__()
        self.stem = nn.Conv2d(1, planes, 3, padding=1, bias=False)
        self.layers = nn.Sequential(Block(planes), Block(planes))
        self.fc = nn.Linear(planes, classes)

    def forward(self, x):
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


def get_args(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dist-backend", default="gloo")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--opt-level", default="O2")
    parser.add_argument("--loss-scale", default=None)
    parser.add_argument("--keep-batchnorm-fp32", default=None)
    parser.add_argument("--combine-grad", action="store_true")
    parser.add_argument("--combine-ddp", action="store_true")
    parser.add_argument("--resume", default=None)
    parser.add_argument("--save", default=None)
    return parser.parse_args(argv)


def batches(args, rank, world_size):
    generator = torch.Generator().manual_seed(1)
    for _ in range(args.steps):
        images = torch.randn(args.batch_size, 1, 8, 8, generator=generator)
        target = (images.mean((1, 2, 3)) * 30).long().clamp(-1, 1) + 1
        yield images[rank::world_size].to(args.device), target[rank::world_size].to(args.device)


def main(argv):
    args = get_args(argv)
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group(args.dist_backend)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)

    torch.manual_seed(0)
    model = ResNet().to(args.device)
    if args.amp:
        optimizer = NpuFusedSGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
        model, optimizer = amp.initialize(
            model,
            optimizer,
            opt_level=args.opt_level,
            loss_scale=args.loss_scale,
            keep_batchnorm_fp32=args.keep_batchnorm_fp32,
            combine_grad=True if args.combine_grad else None,
            combine_ddp=args.combine_ddp,
            verbosity=0,
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    bare = model
    if distributed and not args.combine_ddp:
        model = DistributedDataParallel(model, broadcast_buffers=False)
    criterion = nn.CrossEntropyLoss().to(args.device)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=False)
        bare.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        if args.amp and checkpoint["amp"] is not None:
            amp.load_state_dict(checkpoint["amp"])

    losses, top1 = [], 0.0
    model.train()
    for images, target in batches(args, rank, world_size):
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        if args.amp:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        for images, target in batches(args, rank, world_size):
            top1 += (model(images).argmax(1) == target).float().mean().item() / args.steps

    state = {name: value.cpu() for name, value in bare.state_dict().items()}
    if args.save and rank == 0:
        torch.save(
            {
                "state_dict": state,
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "amp": amp.state_dict() if args.amp else None,
            },
            args.save,
        )
    if distributed:
        dist.destroy_process_group()
    return {"losses": losses, "top1": top1, "state": {name: value.tolist() for name, value in state.items()}}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))

"""The three scripts of examples/gallery once more, in plain torch, on the CPU: what accelcore would do is done by hand.

Models and data are the scripts' own. Each function takes the script's arguments, and returns what its `main` does; in a
job, each rank calls it.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gallery"))
import dcgan
import imagenet
import nanogpt

__all__ = ["NAMES", "OURS", "TWINS"]


def place():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def mean(value):
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value


def wrap(model):
    return DDP(model) if dist.is_initialized() else model


def loader_of(data, batch_size, seed, drop_last=False):
    rank, world_size = place()
    if world_size == 1:
        return DataLoader(data, batch_size, shuffle=True, drop_last=drop_last)
    sampler = DistributedSampler(data, world_size, rank, seed=seed, drop_last=drop_last)
    return DataLoader(data, batch_size // world_size, sampler=sampler, drop_last=drop_last)


class Together:
    """What the two ranks of a job read, batch by batch, for one process that has the whole batch."""

    def __init__(self, data, batch_size, seed):
        samplers = [DistributedSampler(data, 2, rank, seed=seed) for rank in range(2)]
        self.loaders = [DataLoader(data, batch_size // 2, sampler=sampler) for sampler in samplers]

    def __iter__(self):
        for parts in zip(*self.loaders, strict=True):
            yield [torch.cat(each) for each in zip(*parts, strict=True)]


def begin(loader, epoch):
    for each in getattr(loader, "loaders", [loader]):
        if isinstance(each.sampler, DistributedSampler):
            each.sampler.set_epoch(epoch)
    return loader


def train_gpt(argv):
    args, (rank, world_size) = nanogpt.parse(argv), place()
    torch.manual_seed(args.seed)
    text = nanogpt.write_text(args.text)
    training, validation = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    blocks = validation[: len(validation) // args.block_size * args.block_size].view(-1, args.block_size)
    model = nanogpt.GPT(args.block_size, args.layers, args.heads, args.width, args.dropout)
    replica = wrap(model)
    optimizer = torch.optim.AdamW(nanogpt.parameter_groups(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.95))
    factor = nanogpt.schedule(args.warmup, args.steps, floor=0.1)
    context = nullcontext() if args.precision == "fp32" else torch.autocast("cpu", torch.bfloat16)
    accumulate = args.accumulate // world_size
    torch.manual_seed(args.seed + rank)
    history, step = [], 0
    while True:
        if step % args.eval_every == 0:
            with torch.no_grad(), context:
                predicted = model(blocks[:, :-1]).transpose(1, 2)
                history.append(F.cross_entropy(predicted.float(), blocks[:, 1:]).item())
        if step >= args.steps:
            return history
        for group in optimizer.param_groups:
            group["lr"] = args.lr * factor(step)
        for micro in range(accumulate):
            x, y = nanogpt.get_batch(training, args.block_size, args.batch_size)
            last = micro == accumulate - 1
            with nullcontext() if last or world_size == 1 else replica.no_sync():
                with context:
                    loss = F.cross_entropy(replica(x).flatten(0, 1), y.flatten())
                (loss / accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % args.log_every == 0:
            history.append(mean(loss.detach()).item())


def train_resnet(argv):
    args = imagenet.parse(argv)
    torch.manual_seed(args.seed)
    make = Together if args.sync_batchnorm else loader_of  # BatchNorm of the whole batch, by one process
    loader = make(imagenet.Pictures(args.size, args.classes, seed=1), args.batch_size, args.seed)
    validation = DataLoader(imagenet.Pictures(args.size // 5, args.classes, seed=2), args.size)
    model = imagenet.resnet(args.classes, args.width)
    replica = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    history = []
    for epoch in range(args.epochs):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * 0.1 ** (epoch // args.step_size)
        losses = []
        for x, y in begin(loader, epoch):
            loss = F.cross_entropy(replica(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        replica.eval()
        images, targets = next(iter(validation))  # draws a seed, as each pass over a DataLoader does
        with torch.no_grad():
            ranks = (replica(images).argsort(descending=True) == targets[:, None]).nonzero()[:, 1]
        replica.train()
        accuracy = [100 * (ranks < k).float().mean().item() for k in (1, 5)]
        history.append([mean(torch.stack(losses).mean()).item(), *accuracy])
    return history


def train_gan(argv):
    args, (rank, _) = dcgan.parse(argv), place()
    torch.manual_seed(args.seed)
    net_g, net_d = dcgan.create_generator(args.nz, args.ngf), dcgan.create_discriminator(args.ndf)
    for net in (net_g, net_d):
        net.apply(dcgan.weights_init)
    replica_g, replica_d = wrap(net_g), wrap(net_d)
    adam_g, adam_d = (torch.optim.Adam(net.parameters(), lr=args.lr, betas=(0.5, 0.999)) for net in (net_g, net_d))
    loader = loader_of(dcgan.Discs(args.size), args.batch_size, args.seed, drop_last=True)
    torch.manual_seed(args.seed + rank)
    criterion, history = nn.BCEWithLogitsLoss(), []
    for epoch in range(args.epochs):
        for i, real in enumerate(begin(loader, epoch)):
            fake = replica_g(torch.randn(len(real), args.nz, 1, 1))
            ones, zeros = torch.ones(len(real)), torch.zeros(len(real))

            net_d.zero_grad()
            answers = replica_d(real)
            real_loss = criterion(answers, ones)
            real_loss.backward()
            fake_loss = criterion(replica_d(fake.detach()), zeros)
            fake_loss.backward()
            adam_d.step()

            net_g.zero_grad()
            loss_g = criterion(net_d(fake), ones)
            loss_g.backward()
            adam_g.step()
            if i % args.log_every == 0:
                seen = torch.stack([real_loss + fake_loss, loss_g, answers.sigmoid().mean()])
                history.append(mean(seen.detach()).tolist())
    return history


OURS = {"nanogpt": nanogpt.main, "imagenet": imagenet.main, "dcgan": dcgan.main}
TWINS = {"nanogpt": train_gpt, "imagenet": train_resnet, "dcgan": train_gan}
NAMES = tuple(OURS)

"""Models that ranks divide, and what torch makes of them in loops that are written by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

LR, STEPS = 0.05, 2  # the second finds the first one's state


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.outer(torch.nn.functional.gelu(self.inner(self.norm(x))))


class Transformer(nn.Module):
    """Embedding and head share one weight, of a number of rows that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(3))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Convolutions(nn.Module):
    """A residual network with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 5, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(5) for _ in range(2))
        self.layers = nn.ModuleList(nn.Conv2d(5, 5, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(5, 13)

    def forward(self, x):
        x = self.stem(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + torch.relu(norm(layer(x)))
        return self.head(x.mean((2, 3)))


class Partly(nn.Module):
    """One part is frozen, one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.unused = nn.Linear(6, 6), nn.Linear(3, 3)
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = self.frozen(x)
        for block in self.blocks:
            x = block(x)
        return x


MODELS = {"transformer": Transformer, "convolutions": Convolutions, "partly": Partly}
BASIC = ("ours", "torch", "offloaded")  # how every model is trained; the transformer, in all ways
GROUPS = {"transformer": Block, "convolutions": (nn.BatchNorm2d, nn.Conv2d), "partly": Block}


def made(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]()


def batch_of(name: str, rank: int, number: int):
    generator = torch.Generator().manual_seed(1000 * rank + number)
    if name == "transformer":
        return torch.randint(13, (4, 5), generator=generator)
    if name == "convolutions":
        return torch.randn(6, 1, 5, 5, generator=generator)
    return torch.randn(4, 6, generator=generator)


def loss_of(model, batch):
    out = model(batch)
    if batch.dtype == torch.int64:
        return cross_entropy(out.flatten(0, -2).float(), batch.flatten())
    return mse_loss(out.float(), torch.ones_like(out, dtype=torch.float32))


class Momentum(nn.Module):
    """A layer and a frozen one that follows it, by a way that `forward` has or by none."""

    def __init__(self, write=None):
        super().__init__()
        self.trained, self.slow = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.write = write

    @torch.no_grad()
    def follow(self):
        for slow, trained in zip(self.slow.parameters(), self.trained.parameters(), strict=True):
            if self.write == "data":
                slow.data = slow.data * 0.5 + trained.data * 0.5
            else:
                slow.lerp_(trained, 0.5)

    def forward(self, inputs):
        if self.write:
            self.follow()
        return (self.trained(inputs) - self.slow(inputs)).square().mean()


def state(model):
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().double().clone()
        for name, value in model.state_dict().items()
    }


def run(name, rank, train, *, steps=STEPS, accumulate=1):
    for number in range(steps * accumulate):
        train(batch_of(name, rank, number))


def adds_up():
    """Whether torch adds up gradients where it is asked for their average, as 2.7 does over gloo."""
    ones, mean = torch.ones(dist.get_world_size()), torch.empty(1)
    dist.reduce_scatter_tensor(mean, ones, op=dist.ReduceOp.AVG)
    return mean.item() != 1


def by_hand(name, rank, wrap, *, accumulate=1, clip=None, policy=None):
    """A loop with fully_shard as one writes it."""
    divisor = dist.get_world_size() if adds_up() else 1
    model = made(name)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    options = {"mp_policy": policy} if policy else {}
    for part in [part for part in model.modules() if isinstance(part, wrap)]:
        fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3)
    for number in range(STEPS * accumulate):
        (loss_of(model, batch_of(name, rank, number)) / accumulate / divisor).backward()
        if (number + 1) % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return state(model)


def replicated(name, rank):
    """A loop with DistributedDataParallel as one writes it."""
    model = made(name)
    replica = DistributedDataParallel(model, find_unused_parameters=name == "partly")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(replica, batch_of(name, rank, number)).backward()
        optimizer.step()
    return state(model)

"""A small BERT, pre-trained as scripts for Ascend's apex do: accumulation, clipping, a schedule with a warmup."""

import argparse
import json
import os
import sys

import apex
import torch
import torch.distributed as dist
from apex import amp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, LENGTH, MASK = 16, 16, 8, 0


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-12), nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / (WIDTH // 2) ** 0.5, dim=-1)
        x = self.norm1(x + self.out(torch.matmul(weights, v).transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(nn.functional.gelu(self.up(x))))


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.pooler, self.next = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.decoder = nn.Linear(WIDTH, VOCABULARY, bias=True)
        self.decoder.weight = self.words.weight

    def forward(self, tokens):
        x = self.norm(self.words(tokens) + self.positions(torch.arange(LENGTH, device=tokens.device)))
        for layer in self.layers:
            x = layer(x)
        return self.decoder(x), self.next(torch.tanh(self.pooler(x[:, 0])))


def get_args(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dist-backend", default="gloo")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--train-batch-size", type=int, default=8)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--optimizer", default="NpuFusedAdamW")
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--loss-scale", default="dynamic")
    parser.add_argument("--combine-grad", action="store_true")
    parser.add_argument("--combine-ddp", action="store_true")
    parser.add_argument("--two-losses", action="store_true")
    return parser.parse_args(argv)


def batches(args, rank, world_size):
    generator = torch.Generator().manual_seed(2)
    for _ in range(args.steps * args.accumulate):
        tokens = torch.randint(1, VOCABULARY, (args.train_batch_size, LENGTH), generator=generator)
        tokens = tokens[:, :1].expand_as(tokens).add(torch.arange(LENGTH)).remainder(VOCABULARY - 1) + 1
        masked = tokens.clone()
        masked[:, 3] = MASK
        batch = masked, tokens, tokens[:, 0] % 2
        yield [part[rank::world_size].to(args.device) for part in batch]


def main(argv):
    args = get_args(argv)
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group(args.dist_backend)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)

    torch.manual_seed(0)
    model = Bert()
    decayed = [p for n, p in model.named_parameters() if "norm" not in n and "bias" not in n]
    others = [p for n, p in model.named_parameters() if "norm" in n or "bias" in n]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    if args.amp:
        optimizer = getattr(apex.optimizers, args.optimizer)(groups, lr=5e-3)
    else:
        optimizer = torch.optim.AdamW(groups, lr=5e-3)
    model.to(args.device)  # after the optimizer was made, as some scripts do
    if args.amp:
        model, optimizer = amp.initialize(
            model,
            optimizer,
            opt_level=args.opt_level,
            loss_scale=args.loss_scale,
            num_losses=2 if args.two_losses else 1,
            combine_grad=True if args.combine_grad else None,
            combine_ddp=True if args.combine_ddp else None,
            verbosity=0,
        )
    if distributed and not args.combine_ddp:
        model = DistributedDataParallel(model, broadcast_buffers=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    criterion = nn.CrossEntropyLoss()

    losses, norms = [], []
    model.train()
    optimizer.zero_grad()
    for number, (masked, tokens, label) in enumerate(batches(args, rank, world_size), 1):
        last = number % args.accumulate == 0
        prediction, relation = model(masked)
        mlm = criterion(prediction.view(-1, VOCABULARY), tokens.reshape(-1)) / args.accumulate
        nsp = criterion(relation, label) / args.accumulate
        if not args.amp:
            (mlm + nsp).backward()
        elif args.two_losses:
            with amp.scale_loss(mlm, optimizer, loss_id=0) as scaled_loss:
                scaled_loss.backward(retain_graph=True)
            with amp.scale_loss(nsp, optimizer, loss_id=1) as scaled_loss:
                scaled_loss.backward()
        else:
            with amp.scale_loss(mlm + nsp, optimizer, delay_unscale=not last) as scaled_loss:
                scaled_loss.backward()
        losses.append((mlm + nsp).item() * args.accumulate)
        if last:
            clipped = amp.master_params(optimizer) if args.amp else model.parameters()
            norms.append(nn.utils.clip_grad_norm_(clipped, 1.0).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    state = {name.removeprefix("module."): value.tolist() for name, value in model.state_dict().items()}
    if distributed:
        dist.destroy_process_group()
    return {"losses": losses, "norms": norms, "state": state}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))

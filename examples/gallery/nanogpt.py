"""Train a GPT on random crops of one long text, in the style of nanoGPT.

    python examples/gallery/nanogpt.py
    torchrun --nproc-per-node 2 examples/gallery/nanogpt.py --precision bf16

The script makes its text itself: sentences of three words each, as bytes. The model learns letters, then words, then
which word follows which. Its validation loss falls from 5.6 to below 0.3 nats per byte. With --resume, training
continues from the best checkpoint.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import accelcore


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.attention(self.ln_1(x)).chunk(3, 2)
        )
        attended = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, block_size: int, layers: int, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.apply(self._init_weights)
        self.head.weight = self.tokens.weight  # weight tying

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.ln_f(self.blocks(x)))


def write_text(length: int) -> Tensor:
    """Return a text of `length` bytes, the same in every run."""
    rng = random.Random(1337)
    names, verbs, things = (
        ("ada", "grace", "alan", "edsger"),
        ("writes", "proves", "runs"),
        ("a loop", "a lemma", "code"),
    )
    text = ""
    while len(text) < length:
        text += f"{rng.choice(names)} {rng.choice(verbs)} {rng.choice(things)}. "
    return torch.tensor(list(text[:length].encode()))


def get_batch(text: Tensor, block_size: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return random crops, and the same crops moved by one byte."""
    starts = torch.randint(len(text) - block_size, (batch_size, 1))
    crops = text[starts + torch.arange(block_size + 1)]
    return crops[:, :-1], crops[:, 1:]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices and embeddings decay; biases and layer norms do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def schedule(warmup: int, steps: int, floor: float) -> Callable[[int], float]:
    """Return a function of the step: the share of the learning rate, with linear warmup, cosine decay and a floor."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def main(argv: list[str] | None = None) -> list[float]:
    """Train, and return the losses and validation losses in the order in which they were printed."""
    args = parse(argv)
    accel = accelcore.select()
    with accel.distributed() as job:
        accel.runtime.seed(args.seed)
        text = write_text(args.text)
        training, validation = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
        blocks = validation[: len(validation) // args.block_size * args.block_size].view(-1, args.block_size)

        model = GPT(args.block_size, args.layers, args.heads, args.width, args.dropout)
        groups = parameter_groups(model, args.weight_decay)
        optimizer = accel.optimizers.create("adamw", groups, lr=args.lr, betas=(0.9, 0.95))
        factor = schedule(args.warmup, args.steps, floor=0.1)
        trainer = accel.trainer(
            model, optimizer, loss=loss_of, scheduler=LambdaLR(optimizer, factor), precision=args.precision,
            accumulate=args.accumulate // job.world_size, clip_norm=1.0, compile=args.compile, parallel="ddp",
        )  # fmt: skip
        accel.runtime.seed(args.seed + job.rank)  # each rank draws crops of its own
        if args.resume:
            trainer.resume(args.output)
        history = []

        def evaluate() -> float:
            losses = []
            for batch in trainer.evaluate(blocks.split(args.batch_size)):
                predicted = model(batch[:, :-1]).transpose(1, 2)
                losses.append(nn.functional.cross_entropy(predicted.float(), batch[:, 1:], reduction="none").mean(1))
            return job.gather(losses).mean().item()

        while True:
            history.append(evaluate())
            job.print(f"step {trainer.steps}: validation loss {history[-1]:.4f}")
            if trainer.steps and history[-1] < trainer.extra.get("best", math.inf):
                trainer.save(args.output, keep=1, extra={"best": history[-1]})
            updates = min(args.eval_every, args.steps - trainer.steps)
            if updates <= 0:
                return history
            crops = (get_batch(training, args.block_size, args.batch_size) for _ in range(updates * trainer.accumulate))
            # An epoch is what lies between two evaluations. Each rank draws crops of its own, so nothing is divided.
            for batch in trainer.batches(crops, shard=False):
                loss = trainer(batch)
                if trainer.window_closed and trainer.steps % args.log_every == 0:
                    history.append(job.mean(loss).item())  # waits for the device, so do it rarely
                    job.print(f"step {trainer.steps}: loss {history[-1]:.4f}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    summary = "Train a GPT on random crops of one long text."
    parser = argparse.ArgumentParser(description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--output", default="outputs/nanogpt", help="folder of the best checkpoint")
    add("--resume", action="store_true", help="continue from the checkpoint in --output")
    add("--seed", type=int, default=1337, help="seed of the weights and the crops")
    add("--text", type=int, default=200_000, help="length of the text, in bytes")
    add("--steps", type=int, default=200, help="updates")
    add("--eval-every", type=int, default=50, help="updates between two evaluations")
    add("--log-every", type=int, default=10, help="updates between two losses that are printed")
    add("--batch-size", type=int, default=8, help="crops in a micro-batch, on each rank")
    add("--accumulate", type=int, default=4, help="micro-batches for each update, of all ranks together")
    add("--block-size", type=int, default=64, help="bytes in a crop")
    add("--layers", type=int, default=2, help="blocks")
    add("--heads", type=int, default=4, help="attention heads of a block")
    add("--width", type=int, default=64, help="width of the model")
    add("--dropout", type=float, default=0.0, help="share of features that are dropped in training")
    add("--lr", type=float, default=3e-3, help="the highest learning rate")
    add("--warmup", type=int, default=20, help="updates until the highest learning rate is reached")
    add("--weight-decay", type=float, default=0.1, help="weight decay of matrices and embeddings")
    add(
        "--precision",
        choices=("fp32", "bf16", "fp16", "best"),
        default="fp32",
        help="dtype of the forward pass; best: the fastest here",
    )
    add("--compile", action="store_true", help="compile the model")
    args = parser.parse_args(argv)
    if os.path.isfile(args.output):
        parser.error(f"--output {args.output} is a file, not a folder")
    for name, value in vars(args).items():
        if type(value) is int and name not in ("seed", "warmup") and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    if args.width % args.heads:
        parser.error("--width must be a multiple of --heads")
    if args.text < 20 * args.block_size:
        parser.error("--text must be 20 times --block-size, or more")
    return args


if __name__ == "__main__":
    try:
        main()
    except accelcore.AccelError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)

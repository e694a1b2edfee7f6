"""Train a byte-level GPT on the Python standard library: one script for every device.

    python examples/train_gpt.py                       # less than two minutes on two cores
    python examples/train_gpt.py --resume              # continue from the newest checkpoint
    torchrun --nproc-per-node 2 examples/train_gpt.py  # the same on two devices

The text is the source code of Python's own library, so nothing is downloaded. Whole files are held out for
validation, and the loss on them is shown beside that of a bigram model of the training text. The output folder gets
checkpoints, `metrics.jsonl` (one line for each logged step, then a summary) and `loss.png`.

Exit codes: 0 done, 1 impossible here, 2 wrong options, 130 interrupted (Ctrl-C, which saves a checkpoint first).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import accelcore

try:
    from matplotlib.figure import Figure
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
except ImportError as error:
    sys.exit(
        f'train_gpt.py needs {error.name}, which is not installed: pip install ".[examples]" in a clone of accelcore'
    )

VOCABULARY = 256  # a token is a byte
HEAD_WIDTH = 32


class Block(nn.Module):
    """Causal self-attention, then an MLP, each on the normalised residual stream (pre-LN)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attention_in(self.attention_norm(x)).unflatten(-1, (3, -1, HEAD_WIDTH))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A transformer decoder over bytes; its embedding is also its output head."""

    def __init__(self, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=width**-0.5)  # the first logits then have a variance of about 1

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return nn.functional.linear(self.norm(self.blocks(x)), self.token.weight)


def read_sources(limit: int = 8_000_000) -> tuple[Tensor, Tensor]:
    """The standard library's source code as training bytes, at most `limit`, and validation bytes.

    About one file in ten is held out, chosen by a hash of its name: the same ones in every run and on every rank.
    """
    # Installed packages and tests are not the library's code; tables and generated text are not code.
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}
    root = Path(sysconfig.get_path("stdlib"))
    training, validation = bytearray(), bytearray()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if left_out.isdisjoint(name.parts):
            held_out = hashlib.sha256(name.as_posix().encode()).digest()[0] < 256 // 10
            (validation if held_out else training).extend(path.read_bytes())
    if min(len(training), len(validation)) < 100_000:
        sys.exit(f"there is too little Python source code in {root} to train on")
    return torch.frombuffer(training[:limit], dtype=torch.uint8), torch.frombuffer(validation, dtype=torch.uint8)


def next_byte_loss(model: Any, windows: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of each byte of the windows but the first, given those before it."""
    tokens = windows.long()
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def bigram_loss(text: Tensor, windows: Tensor, smoothing: float = 0.1) -> float:
    """Return the same for a model that only knows how often each byte follows each other byte in `text`."""
    pairs = torch.bincount(text[:-1].long() * VOCABULARY + text[1:].long(), minlength=VOCABULARY**2)
    counts = pairs.view(VOCABULARY, VOCABULARY) + smoothing
    log_probability = (counts / counts.sum(dim=1, keepdim=True)).log()
    tokens = windows.long()
    return -log_probability[tokens[:, :-1], tokens[:, 1:]].mean().item()


@torch.no_grad()
def validation_loss(accel: accelcore.Backend, trainer: accelcore.Trainer, windows: Tensor) -> float:
    """The model's mean loss on held-out windows."""
    trainer.model.eval()
    total = 0.0
    for batch in windows.split(64):
        with trainer.autocast():
            total += next_byte_loss(trainer.model, accel.runtime.to_device(batch)).item() * len(batch)
    trainer.model.train()
    return total / len(windows)


@torch.no_grad()
def generate(accel: accelcore.Backend, trainer: accelcore.Trainer, prompt: bytes, count: int, context: int) -> str:
    """`prompt` and `count` more bytes, drawn from the model at temperature 0.8, as text."""
    trainer.model.eval()
    tokens = accel.runtime.to_device(torch.tensor([list(prompt)]))
    for _ in range(count):
        with trainer.autocast():
            logits = trainer.model(tokens[:, -context:])[:, -1].float()
        tokens = torch.cat([tokens, torch.multinomial((logits / 0.8).softmax(dim=1), 1)], dim=1)
    trainer.model.train()
    text = bytes(tokens[0].tolist()).decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


class Report:
    """Show and write what rank 0 reports: progress (a bar on a terminal, else lines), metrics, and the loss curve."""

    def __init__(self, folder: Path, first: int, total: int, bigram: float) -> None:
        self.folder, self.first, self.total, self.bigram = folder, first, total, bigram
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        self.steps: list[dict[str, Any]] = []
        if first and path.exists():  # a resumed run takes over what was logged up to its checkpoint
            whole_lines = path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
            self.steps = [entry for entry in map(json.loads, whole_lines) if entry.get("step", math.inf) <= first]
        self.file = path.open("w", encoding="utf-8")
        self.write(*self.steps)
        columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}"))
        self.bar = Progress(*columns, TimeRemainingColumn(), disable=not sys.stdout.isatty())
        self.task = self.bar.add_task("", total=total, completed=first)
        self.start = time.perf_counter()

    def write(self, *entries: dict[str, Any]) -> None:
        self.file.writelines(json.dumps(entry) + "\n" for entry in entries)
        self.file.flush()

    def step(self, entry: dict[str, Any]) -> None:
        self.write(entry)
        self.steps.append(entry)
        text = f"loss {entry['loss']:.3f}  {entry['tokens_per_second']:,.0f} tokens/s"
        if "validation_loss" in entry:
            text += f"  validation loss {entry['validation_loss']:.3f}"
        self.bar.update(self.task, completed=entry["step"], description=text)
        if self.bar.disable:
            pace = (time.perf_counter() - self.start) / (entry["step"] - self.first)
            left = timedelta(seconds=round(pace * (self.total - entry["step"])))
            print(f"step {entry['step']}/{self.total}  {text}  {left} left", flush=True)

    def finish(self, step: int, loss: float, sample: str) -> None:
        losses = {"validation_loss": loss, "bigram_loss": self.bigram}
        bits = {"validation_bits": loss / math.log(2), "bigram_bits": self.bigram / math.log(2)}
        seconds = time.perf_counter() - self.start
        self.write({"summary": {**losses, **bits, "steps": step, "seconds": seconds, "sample": sample}})
        self.draw(step, loss)
        print(f"\n{sample}\n\nwritten to {self.folder}: metrics.jsonl, loss.png, checkpoints")
        print(f"validation loss  {loss:.3f} nats/byte  {bits['validation_bits']:.3f} bits/byte")
        print(f"bigram baseline  {self.bigram:.3f} nats/byte  {bits['bigram_bits']:.3f} bits/byte")
        if loss >= self.bigram:
            print(f"After {step} steps the model is no better than the bigram baseline: train longer, with --steps.")

    def draw(self, step: int, loss: float) -> None:
        validated = [(entry["step"], entry["validation_loss"]) for entry in self.steps if "validation_loss" in entry]
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        axes.plot([entry["step"] for entry in self.steps], [entry["loss"] for entry in self.steps], label="training")
        axes.plot(*zip(*validated, (step, loss), strict=True), marker="o", label="validation")
        axes.axhline(self.bigram, color="gray", linestyle="--", label="bigram baseline, validation")
        axes.set(xlabel="optimizer steps", ylabel="loss (nats/byte)", title="Byte-level GPT on the standard library")
        axes.legend()
        figure.savefig(self.folder / "loss.png", dpi=120)


@contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Let the first Ctrl-C set an event: a checkpoint that is saved at once could hold half a step."""
    asked = threading.Event()

    def note(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the second one stops the program where it is

    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def train(
    accel: accelcore.Backend,
    trainer: accelcore.Trainer,
    loader: DataLoader[Any],
    validation: Tensor,
    args: argparse.Namespace,
    report: Report | None,
) -> bool:
    """Train up to `args.steps`, and save. Return False if Ctrl-C ended the training before."""
    losses: list[Tensor] = []
    logged = saved = trainer.steps
    clock = time.perf_counter()
    with deferred_interrupt() as asked, nullcontext() if report is None else report.bar:
        while trainer.steps < args.steps:
            for batch in trainer.batches(loader):
                losses.append(trainer(batch))
                finished = trainer.steps >= args.steps
                # Reading a loss makes the host wait for the device, so all that follows is done every few steps only.
                if trainer.steps - logged < args.log_every and not finished:
                    continue
                # Ranks must stop at the same step, so the request to stop is averaged with the loss.
                wish = torch.tensor(float(asked.is_set()), device=accel.device)
                figures = torch.stack([torch.stack(losses).mean(), wish])
                loss, stop = accel.collectives.all_reduce(figures, "avg").tolist()
                tokens = len(losses) * args.batch_size * args.context * accel.collectives.world_size
                rate = tokens / (time.perf_counter() - clock)
                entry = {"step": trainer.steps, "loss": loss, "tokens_per_second": rate}
                due = trainer.steps - saved >= args.checkpoint_every and not finished
                if due:
                    entry["validation_loss"] = validation_loss(accel, trainer, validation)
                if report is not None:
                    report.step(entry)
                if due or stop or finished:  # inside the loop: outside it, this epoch would be over
                    trainer.save(args.checkpoints, keep=2)
                    saved = trainer.steps
                if stop or finished:
                    return finished
                losses, logged, clock = [], trainer.steps, time.perf_counter()
    return True


def run(args: argparse.Namespace) -> int:
    accel = accelcore.select()
    with accel.distributed():
        accel.runtime.seed(args.seed)
        text, held_out = read_sources()
        # A window is the bytes that the model reads and one more, the last to predict; the next starts with that one.
        windows = text.unfold(0, args.context + 1, args.context)
        loader = DataLoader(TensorDataset(windows), args.batch_size, shuffle=True, drop_last=True)
        validation = held_out.unfold(0, args.context + 1, args.context)
        validation = validation[:: math.ceil(len(validation) / 1000)]

        model = GPT(args.context, args.width, args.layers)
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = accel.optimizers.create("adamw", groups, lr=args.lr, betas=(0.9, 0.95))
        warmup = min(100, args.steps // 5)
        scheduler = LambdaLR(
            optimizer, lambda step: min((step + 1) / (warmup + 1), 0.52 + 0.48 * math.cos(math.pi * step / args.steps))
        )
        trainer = accel.trainer(
            model,
            optimizer,
            loss=lambda model, batch: next_byte_loss(model, *batch),
            scheduler=scheduler,
            precision=args.precision,
            accumulate=args.accumulate,
            clip_norm=1.0,
            parallel="ddp",
            compile=args.compile,
        )

        resumed = trainer.resume(args.checkpoints) if args.resume else None
        first, report = trainer.steps, None
        if accel.collectives.rank == 0:
            origin = f"resumed from {resumed}" if resumed else "from the start"
            size = f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters"
            print(f"{accel.name}:{accel.index}, {size}, {len(text):,} bytes of text, {origin}")
            if resumed is None:  # what an older run saved here must not be taken for this one's
                for path in args.checkpoints.glob("step-*"):
                    shutil.rmtree(path)
            report = Report(args.output, first, args.steps, bigram_loss(text, validation))
        if not train(accel, trainer, loader, validation, args, report):
            if report is not None:
                print(f"interrupted at step {trainer.steps}; --resume continues from there", file=sys.stderr)
            return 130
        loss = validation_loss(accel, trainer, validation)
        if report is not None:
            report.finish(trainer.steps, loss, generate(accel, trainer, b"def ", 400, args.context))
    return 0


def parse() -> argparse.Namespace:
    def count(text: str) -> int:
        if int(text) < 1:
            raise ValueError
        return int(text)

    summary = "Train a byte-level GPT on the source code of the Python standard library."
    parser = argparse.ArgumentParser(description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--steps", type=count, default=400, help="optimizer steps")
    add("--batch-size", type=count, default=32, help="windows of text in a micro-batch, on each rank")
    add("--accumulate", type=count, default=1, help="micro-batches for each optimizer step")
    add("--context", type=count, default=64, help="bytes the model sees")
    add("--width", type=count, default=128, help=f"width of the residual stream, a multiple of {HEAD_WIDTH}")
    add("--layers", type=count, default=2, help="transformer blocks")
    add("--lr", type=float, default=5e-3, help="highest learning rate, after a warm-up and before a cosine's fall")
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="dtype of the forward pass")
    add("--compile", action="store_true", help="compile the model, which pays off in runs of many minutes")
    add("--seed", type=int, default=0, help="seed of the weights, the order of the data and the sample")
    add("--log-every", type=count, default=10, help="steps between two lines of metrics")
    add("--checkpoint-every", type=count, default=100, help="steps between two checkpoints, each with a validation")
    add("--output", type=Path, default=Path("outputs/gpt"), help="folder, where a new run replaces an older one")
    add("--resume", action="store_true", help="continue from the newest checkpoint in the folder, if there is one")
    args = parser.parse_args()
    if args.output.is_file():
        parser.error(f"--output {args.output} is a file, not a folder")
    if args.width % HEAD_WIDTH:
        parser.error(f"--width {args.width} is not a multiple of {HEAD_WIDTH}")
    if args.context > 100_000:
        parser.error("--context must be 100000 or less")
    args.checkpoints = args.output / "checkpoints"
    return args


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a sample may hold characters that the terminal cannot show
    try:
        sys.exit(run(parse()))
    except (accelcore.AccelError, OSError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        print("interrupted; nothing was saved since the last checkpoint", file=sys.stderr)
        sys.exit(130)

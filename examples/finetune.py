"""Fine-tune a pretrained model: a new head on a body that is frozen at first, and unfrozen at a later epoch.

    python examples/finetune.py
    python examples/finetune.py --weights model.safetensors    # a file of this network, also .pth

Nothing is downloaded: without --weights, the first run pretrains a small network on 16 kinds of picture, and saves it.
Then it learns 8 other kinds from 10 pictures of each: at first it trains only the new head, later also the body, at a
tenth of the learning rate. An interrupted run resumes.
"""

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import accelcore


class Network(nn.Module):
    def __init__(self, kinds: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(64, kinds)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.body(pictures))


def pictures(kinds: int, of_each: int, seed: int) -> TensorDataset:
    """Draw pictures of 16 x 16 pixels: each kind is a wave of its own, at a random place and under noise."""
    waves = torch.randn(kinds, 2, 1, 1, generator=torch.Generator().manual_seed(kinds))
    generator, targets = torch.Generator().manual_seed(seed), torch.arange(kinds).repeat(of_each)
    place = 20 * torch.rand(len(targets), 2, 1, 1, generator=generator)
    x, y = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    phase = ((torch.stack((x, y)) + place) * waves[targets]).sum(1, keepdim=True)
    return TensorDataset(phase.sin() + torch.randn(phase.shape, generator=generator), targets)


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def pretrain(accel: accelcore.Backend, folder: Path, epochs: int) -> Path:
    """Return the file of weights of the first task. If a run before has finished it, nothing is trained."""
    model = Network(kinds=16)
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=3e-3)
    trainer = accel.trainer(model, optimizer, loss=loss_of, parallel="ddp")
    saved = trainer.resume(folder)
    for _ in trainer.epochs(epochs):
        for batch in trainer.batches(DataLoader(pictures(16, 60, seed=1), 32, shuffle=True)):
            trainer(batch)
        saved = trainer.save(folder, keep=1)
    return saved / "model.safetensors"


def run(args: argparse.Namespace) -> None:
    accel = accelcore.select()
    with accel.distributed() as job:
        accel.runtime.seed(0)
        path = args.weights or pretrain(accel, args.output / "pretrained", args.pretraining)
        is_safe = path.suffix == ".safetensors"
        try:
            weights = load_file(path) if is_safe else torch.load(path, map_location=accel.device, weights_only=True)
        except Exception as error:  # noqa: BLE001  # a damaged file raises errors of many classes
            sys.exit(f"--weights {path} cannot be read: {type(error).__name__}: {error}".splitlines()[0])
        accel.runtime.seed(0)  # again: pretraining drew numbers, if it ran
        model = Network(kinds=8)
        body = {name.removeprefix("body."): weight for name, weight in weights.items() if name.startswith("body.")}
        model.body.load_state_dict(body)  # strict: an error names what is missing. The head stays new
        model.body.requires_grad_(False)
        groups = [{"params": model.head.parameters()}, {"params": model.body.parameters(), "lr": 5e-4}]
        optimizer = accel.optimizers.create("adamw", groups, lr=5e-3)
        trainer = accel.trainer(model, optimizer, loss=loss_of, parallel="ddp")
        loader = DataLoader(pictures(8, 10, seed=2), 16, shuffle=True)
        held_out = DataLoader(pictures(8, 100, seed=3), 100)

        def accuracy() -> float:
            return trainer.evaluate(held_out).mean(lambda batch: model(batch[0]).argmax(1) == batch[1])

        folder = args.output / "finetuned"
        trainer.resume(folder)
        for epoch in trainer.epochs(args.epochs):
            if epoch >= args.unfreeze and not model.body[0].weight.requires_grad:  # not ==: the run may resume
                model.body.requires_grad_(True)
                trainer.refresh()
            for batch in trainer.batches(loader):
                loss = trainer(batch)
            reached = accuracy()
            job.print(f"epoch {epoch + 1}/{args.epochs}: loss {job.mean(loss):.3f}, accuracy {reached:.3f}", flush=True)
            trainer.save(folder, keep=1, best=reached, mode="max")
        trainer.resume(folder, best=True)
        job.print(f"accuracy of the best epoch, on held-out pictures: {accuracy():.3f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a pretrained model to tell new kinds of picture.")
    add = parser.add_argument
    add("--output", type=Path, default=Path("outputs/finetune"), help="folder of the checkpoints")
    add("--weights", type=Path, help="pretrained weights, .safetensors or .pth; if left out, the script trains them")
    add("--pretraining", type=int, default=8, help="passes over the first pictures, if no weights are given")
    add("--epochs", type=int, default=12, help="passes over the pictures")
    add("--unfreeze", type=int, default=4, help="first epoch, counted from 0, that trains the body, too")
    args = parser.parse_args()
    if args.output.is_file():
        parser.error(f"--output {args.output} is a file, not a folder")
    return args


if __name__ == "__main__":
    try:
        run(parse())
    except (accelcore.AccelError, OSError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)

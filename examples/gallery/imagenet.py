"""Train a ResNet to classify pictures, in the style of torchvision's reference for ImageNet.

    python examples/gallery/imagenet.py
    torchrun --nproc-per-node 2 examples/gallery/imagenet.py --precision best

The script draws its pictures itself: each class is a pattern of waves, and a picture shows a random part of it under
noise. After each epoch, top-1 and top-5 accuracy are measured on other pictures. --resume continues from the last
epoch, and --evaluate measures the best one.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

import accelcore


class Pictures(Dataset):
    """`size` pictures of 3 x 32 x 32 pixels, each with its class."""

    def __init__(self, size: int, classes: int, seed: int) -> None:
        self.size, self.classes, self.seed = size, classes, seed
        self.waves = torch.randn(classes, 3, 2, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.seed * self.size + index)
        target = index % self.classes
        place = 20 * torch.rand(2, 1, generator=generator) + torch.arange(32) / 2
        phases = self.waves[target] @ torch.stack(torch.meshgrid(*place, indexing="ij")).flatten(1)
        return phases.view(3, 32, 32).sin() + 2 * torch.randn(3, 32, 32, generator=generator), target


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (out + self.downsample(x)).relu()


def resnet(classes: int, width: int) -> nn.Module:
    stem = [nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    blocks = [BasicBlock(width, width, 1), BasicBlock(width, 2 * width, 2), BasicBlock(2 * width, 4 * width, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, targets = batch
    return nn.functional.cross_entropy(model(images), targets)


def validate(job, trainer: accelcore.Trainer, loader: DataLoader) -> list[float]:
    """Return top-1 and top-5 accuracy in per cent, over the pictures of all ranks."""
    hits = []
    for images, targets in trainer.evaluate(loader):
        hits.append(trainer.model(images).topk(5).indices == targets[:, None])
    hits = job.gather(hits).float()
    return [100 * hits[:, :k].sum(1).mean().item() for k in (1, 5)]


def main(argv: list[str] | None = None) -> list[list[float]]:
    """Train, and return the mean loss, top-1 and top-5 accuracy of each epoch."""
    args = parse(argv)
    accel = accelcore.select()
    with accel.distributed() as job:
        accel.runtime.seed(args.seed)
        torch.backends.cudnn.benchmark = True  # accel: ignore[ACC112]  # has no effect on other devices
        loading = {"num_workers": args.workers, **accel.loading()}
        pictures = Pictures(args.size, args.classes, seed=1)
        train_loader = DataLoader(pictures, args.batch_size // job.world_size, shuffle=True, **loading)
        val_loader = DataLoader(Pictures(args.size // 5, args.classes, seed=2), args.batch_size, **loading)

        model = resnet(args.classes, args.width)
        if args.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        optimizer = accel.optimizers.create("sgd", model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
        scheduler = StepLR(optimizer, step_size=args.step_size, gamma=0.1)
        trainer = accel.trainer(
            model, optimizer, loss=loss_of, precision=args.precision, parallel="ddp",
            scheduler=scheduler, schedule_by="script",
        )  # fmt: skip
        if args.evaluate:
            trainer.resume(args.output, best=True, must_exist=True)
            top1, top5 = validate(job, trainer, val_loader)
            job.print(f"top-1 {top1:.1f}%  top-5 {top5:.1f}%")
            return [[top1, top5]]
        if args.resume:
            trainer.resume(args.output)
        history = []
        for epoch in trainer.epochs(args.epochs):
            losses = [trainer(batch) for batch in trainer.batches(train_loader)]
            scheduler.step()
            loss = job.mean(torch.stack(losses).mean()).item()
            top1, top5 = validate(job, trainer, val_loader)
            history.append([loss, top1, top5])
            job.print(f"epoch {epoch + 1}/{args.epochs}: loss {loss:.4f}  top-1 {top1:.1f}%  top-5 {top5:.1f}%")
            trainer.save(args.output, keep=1, best=top1, mode="max")
        return history


def parse(argv: list[str] | None) -> argparse.Namespace:
    summary = "Train a ResNet to classify pictures."
    parser = argparse.ArgumentParser(description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--output", default="outputs/imagenet", help="folder of the last and the best checkpoint")
    add("--resume", action="store_true", help="continue from the last epoch in --output")
    add("--evaluate", action="store_true", help="measure the best epoch in --output, and train nothing")
    add("--seed", type=int, default=0, help="seed of the weights and the order of the data")
    add("--epochs", type=int, default=6, help="passes over the pictures")
    add("--size", type=int, default=2000, help="pictures to train on; a fifth as many validate")
    add("--classes", type=int, default=40, help="kinds of picture")
    add("--batch-size", type=int, default=50, help="pictures for each update, of all ranks together")
    add("--workers", type=int, default=0, help="processes that make pictures")
    add("--width", type=int, default=16, help="channels of the first block")
    add("--lr", type=float, default=0.05, help="learning rate at the beginning")
    add("--step-size", type=int, default=4, help="epochs after which the learning rate is divided by ten")
    add(
        "--precision",
        choices=("fp32", "bf16", "fp16", "best"),
        default="fp32",
        help="dtype of the forward pass; best: the fastest here",
    )
    add("--sync-batchnorm", action="store_true", help="normalize by the statistics of all ranks")
    args = parser.parse_args(argv)
    if os.path.isfile(args.output):
        parser.error(f"--output {args.output} is a file, not a folder")
    for name, value in vars(args).items():
        if type(value) is int and name not in ("seed", "workers") and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    if args.classes < 5:
        parser.error("--classes must be 5 or more, because top-5 accuracy is measured")
    return args


if __name__ == "__main__":
    try:
        main()
    except accelcore.AccelError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)

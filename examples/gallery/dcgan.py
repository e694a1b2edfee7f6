"""Train a generator and a discriminator of small pictures against each other, in the style of torch's DCGAN example.

    python examples/gallery/dcgan.py
    torchrun --nproc-per-node 2 examples/gallery/dcgan.py

The script draws the real pictures itself: soft discs of random size and place. Each network has its own trainer. The
generator's loss runs through the discriminator and leaves gradients there. They have no effect, because each trainer
uses only the gradients of its own windows. Both networks are saved together after each epoch. --resume continues from
there: a run that was killed then ends like an undisturbed one.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import accelcore


class Discs(Dataset):
    """`size` pictures of 1 x 16 x 16 pixels, within -1 and 1."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        places = 4 + 8 * torch.rand(size, 2, 1, 1, generator=generator)
        radii = 2 + 3 * torch.rand(size, 1, 1, generator=generator)
        rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        distances = ((rows - places[:, 0]) ** 2 + (columns - places[:, 1]) ** 2).sqrt()
        self.pictures = torch.tanh(radii - distances)[:, None]

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Tensor:
        return self.pictures[index]


def create_generator(nz: int, ngf: int) -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(nz, ngf * 2, 4, bias=False), nn.BatchNorm2d(ngf * 2), nn.ReLU(),
        nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf), nn.ReLU(),
        nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip


def create_discriminator(ndf: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2),
        nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ndf * 2), nn.LeakyReLU(0.2),
        nn.Conv2d(ndf * 2, 1, 4, bias=False), nn.Flatten(0),
    )  # fmt: skip


def weights_init(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


def is_real(answers: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(answers, torch.ones_like(answers))


def is_fake(answers: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(answers, torch.zeros_like(answers))


def main(argv: list[str] | None = None) -> list[list[float]]:
    """Train, and return both losses and D(x), the answer to real pictures, of each line that was printed."""
    args = parse(argv)
    accel = accelcore.select()
    with accel.distributed() as job:
        accel.runtime.seed(args.seed)
        net_g, net_d = create_generator(args.nz, args.ngf), create_discriminator(args.ndf)
        for net in (net_g, net_d):
            net.apply(weights_init)
        adam = {"lr": args.lr, "betas": (0.5, 0.999)}
        options = {"precision": args.precision, "parallel": "ddp"}
        train_g = accel.trainer(net_g, accel.optimizers.create("adam", net_g.parameters(), **adam), **options)
        train_d = accel.trainer(net_d, accel.optimizers.create("adam", net_d.parameters(), **adam), **options)
        both = accelcore.Together(generator=train_g, discriminator=train_d)
        loader = DataLoader(Discs(args.size), args.batch_size // job.world_size, shuffle=True, drop_last=True)
        accel.runtime.seed(args.seed + job.rank)  # each rank draws noise of its own
        if args.resume:
            both.resume(args.output)

        history = []
        for epoch in train_d.epochs(args.epochs):
            for i, real in enumerate(train_d.batches(loader)):
                noise = accel.runtime.to_device(torch.randn(len(real), args.nz, 1, 1))

                # Tell real from fake.
                with train_d.autocast():
                    fake = train_g.forward(noise)
                    answers = train_d.forward(real)
                    loss_d = is_real(answers) + is_fake(train_d.forward(fake.detach()))
                train_d.backward(loss_d)
                train_d.update()

                # Fool the discriminator. The bare module is called, because this step does not train it.
                with train_g.autocast():
                    loss_g = is_real(net_d(fake))
                train_g.backward(loss_g)
                train_g.update()

                if i % args.log_every == 0:
                    seen = torch.stack([loss_d, loss_g, answers.sigmoid().mean()])
                    history.append(job.mean(seen).tolist())
                    loss_d, loss_g, share = history[-1]
                    job.print(
                        f"[{epoch}/{args.epochs}][{i}] loss D {loss_d:.4f}  loss G {loss_g:.4f}  D(x) {share:.4f}"
                    )
            both.save(args.output, keep=1)
        return history


def parse(argv: list[str] | None) -> argparse.Namespace:
    summary = "Train a generator and a discriminator of small pictures against each other."
    parser = argparse.ArgumentParser(description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--output", default="outputs/dcgan", help="folder of the checkpoints")
    add("--resume", action="store_true", help="continue from the last epoch in --output")
    add("--seed", type=int, default=999, help="seed of the weights, the noise, and the order of the data")
    add("--epochs", type=int, default=5, help="passes over the real pictures")
    add("--size", type=int, default=1024, help="real pictures")
    add("--batch-size", type=int, default=64, help="pictures for each update, of all ranks together")
    add("--nz", type=int, default=16, help="length of the noise vector from which a picture is made")
    add("--ngf", type=int, default=16, help="width of the generator")
    add("--ndf", type=int, default=16, help="width of the discriminator")
    add("--lr", type=float, default=1e-3, help="learning rate of both networks")
    add("--log-every", type=int, default=4, help="updates between two lines of output")
    add(
        "--precision",
        choices=("fp32", "bf16", "fp16", "best"),
        default="fp32",
        help="dtype of the forward pass; best: the fastest here",
    )
    args = parser.parse_args(argv)
    if os.path.isfile(args.output):
        parser.error(f"--output {args.output} is a file, not a folder")
    for name, value in vars(args).items():
        if type(value) is int and name != "seed" and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    return args


if __name__ == "__main__":
    try:
        main()
    except accelcore.AccelError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)

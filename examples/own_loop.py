"""Your own training loop, with two optimizers and without a trainer: only the roles of a backend.

    python examples/own_loop.py --precision fp16

It needs only torch and accelcore, and takes some ten seconds. The script makes its own data: pictures of 8 x 8 pixels,
of ten kinds, with noise. An autoencoder learns to squeeze each into 16 numbers. Beside it a linear classifier learns to
tell the kind from these numbers. It has its own optimizer and sends no gradient back to the encoder, so its accuracy
shows how well the numbers alone tell the kinds apart. The last line printed is that accuracy on pictures that neither
has seen; 0.1 would be a guess.

The ranks of a job (torchrun) train one model: the loop shares out each batch and averages the gradients itself.

Exit codes: 0 done, 1 impossible here, 2 wrong options, 130 interrupted (Ctrl-C).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import accelcore

GOAL = 0.9
BATCH = 64
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_pictures() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pictures to train on, held-out pictures, and the kinds of each; the same in every run."""
    generator = torch.Generator().manual_seed(0)
    kinds = nn.functional.interpolate(torch.rand(10, 1, 3, 3, generator=generator), size=8, mode="bilinear").flatten(1)
    labels = torch.randint(10, (1800,), generator=generator)
    brightness = 0.5 + torch.rand(1800, 1, generator=generator) / 2
    pictures = kinds[labels] * brightness + 0.05 * torch.randn(1800, 64, generator=generator)
    return pictures[:1350], pictures[1350:], labels[:1350], labels[1350:]


def run(args: argparse.Namespace) -> int:
    accel = accelcore.select()
    with accel.distributed() as job:
        accel.runtime.seed(args.seed)  # the same on every rank, so that all have the same weights and order of data
        images, held_out, labels, held_out_labels = make_pictures()
        encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16)).to(accel.device)
        decoder = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64)).to(accel.device)
        classifier = nn.Linear(16, 10).to(accel.device)
        autoencoder_parameters = [*encoder.parameters(), *decoder.parameters()]
        classifier_parameters = list(classifier.parameters())
        autoencoder_optimizer = accel.optimizers.create("adamw", autoencoder_parameters, lr=3e-3)
        classifier_optimizer = accel.optimizers.create("sgd", classifier_parameters, lr=0.2, momentum=0.9)

        dtype = PRECISIONS[args.precision]
        # Only fp16 has so narrow a range that small gradients vanish; for the others this scaler does nothing, so that
        # one loop serves all three.
        scaler = accel.scaler.create() if dtype is torch.float16 else accel.scaler.none()
        metrics = []
        for epoch in range(1, args.epochs + 1):
            totals = torch.zeros(2, device=accel.device)
            batches = torch.randperm(len(images))[: len(images) // BATCH * BATCH].view(-1, BATCH)
            for batch in batches:
                share = batch[job.rank :: job.world_size]
                x, y = accel.runtime.to_device((images[share], labels[share]))
                with accel.autocast(dtype, enabled=dtype is not None):
                    code = encoder(x)
                    reconstruction_loss = nn.functional.mse_loss(decoder(code).float(), x)
                    classification_loss = nn.functional.cross_entropy(classifier(code.detach()).float(), y)

                scaler.scale(reconstruction_loss + classification_loss).backward()
                # Averaged while still scaled: an overflow on one rank reaches all, and all skip the same update.
                for parameter in (*autoencoder_parameters, *classifier_parameters):
                    accel.collectives.all_reduce(parameter.grad, "avg")
                # Clipping needs the true size of the gradients. An optimizer whose own gradients overflowed is skipped.
                # The scale is chosen once, after both.
                scaler.unscale_(autoencoder_optimizer)
                scaler.unscale_(classifier_optimizer)
                nn.utils.clip_grad_norm_(autoencoder_parameters, 1.0)
                nn.utils.clip_grad_norm_(classifier_parameters, 1.0)
                scaler.step(autoencoder_optimizer)
                scaler.step(classifier_optimizer)
                scaler.update()
                autoencoder_optimizer.zero_grad()
                classifier_optimizer.zero_grad()
                totals += torch.stack([reconstruction_loss.detach(), classification_loss.detach()])

            # Read once an epoch, because the host waits for the device here.
            coded, classified = (job.all_reduce(totals, "avg") / len(batches)).tolist()
            metrics.append({"epoch": epoch, "reconstruction_loss": coded, "classification_loss": classified})
            losses = f"reconstruction loss {coded:.4f}, classification loss {classified:.4f}"
            job.print(f"epoch {epoch}/{args.epochs}: {losses}")

        x, y = accel.runtime.to_device((held_out, held_out_labels))
        with torch.no_grad(), accel.autocast(dtype, enabled=dtype is not None):
            code = encoder(x)
            explained = 1 - (decoder(code).float() - x).square().mean().item() / x.var(dim=0).mean().item()
            accuracy = (classifier(code).argmax(dim=1) == y).float().mean().item()
        if job.is_main:
            summary = {"accuracy": accuracy, "explained_variance": explained, "skipped": scaler.skipped}
            args.output.mkdir(parents=True, exist_ok=True)
            with (args.output / "metrics.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in (*metrics, {"summary": summary}))
            print(f"updates skipped: {scaler.skipped}; reconstructed variance of held-out pictures: {explained:.1%}")
            print(f"accuracy on held-out pictures: {accuracy:.4f}")
            if accuracy < GOAL:
                print(f"It is below the goal of {GOAL}: train longer, with --epochs.")
    return 0


def parse() -> argparse.Namespace:
    summary = "Train an autoencoder and a classifier on its code, with two optimizers and without the trainer."
    parser = argparse.ArgumentParser(description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--seed", type=int, default=0, help="seed of the weights and the order of the data")
    add("--epochs", type=int, default=10, help="passes over the training pictures")
    add("--precision", choices=tuple(PRECISIONS), default="fp32", help="dtype of the forward pass")
    add("--output", type=Path, default=Path("outputs/own_loop"), help="folder for metrics.jsonl")
    args = parser.parse_args()
    if args.output.is_file():
        parser.error(f"--output {args.output} is a file, not a folder")
    if args.epochs < 1:
        parser.error("--epochs must be 1 or more")
    return args


if __name__ == "__main__":
    try:
        sys.exit(run(parse()))
    except (accelcore.AccelError, OSError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)

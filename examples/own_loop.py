"""A training loop of one's own, with two optimizers and without the trainer: the roles of a backend, nothing else.

    python examples/own_loop.py --precision fp16

An autoencoder learns to squeeze scikit-learn's handwritten digits of 8 x 8 pixels into 16 numbers each. Beside it a
linear classifier learns to tell the digit from these numbers. It has its own optimizer and sends no gradient back to
the encoder, so its accuracy says how well the numbers alone tell the digits apart. The last line printed is that
accuracy on images that neither has seen; where it is below 0.9 the exit code is 1.

The ranks of a job (torchrun) train one model: the loop shares out each batch and averages the gradients itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import accelcore

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ImportError as error:
    sys.exit(f'own_loop.py needs {error.name}, which is not installed: pip install "accelcore[examples]"')

GOAL = 0.9
BATCH = 64
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def read_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images, held-out images, and the labels of each; pixels in [0, 1]."""
    pixels, labels = load_digits(return_X_y=True)
    train, held_out = train_test_split(range(len(labels)), test_size=0.25, stratify=labels, random_state=0)
    images, targets = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    return images[train], images[held_out], targets[train], targets[held_out]


def run(args: argparse.Namespace) -> int:
    accel = accelcore.select()
    with accel.distributed() as job:
        accel.runtime.seed(args.seed)  # alike on every rank, which makes weights and order of the data alike
        images, held_out, labels, held_out_labels = read_digits()
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
                # Clipping needs the true size of the gradients. An optimizer whose own gradients overflowed is skipped;
                # the scale is chosen anew once, after both.
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
            if job.rank == 0:
                print(f"epoch {epoch}/{args.epochs}  reconstruction {coded:.4f}  classification {classified:.4f}")

        x, y = accel.runtime.to_device((held_out, held_out_labels))
        with torch.no_grad(), accel.autocast(dtype, enabled=dtype is not None):
            code = encoder(x)
            explained = 1 - (decoder(code).float() - x).square().mean().item() / x.var(dim=0).mean().item()
            accuracy = (classifier(code).argmax(dim=1) == y).float().mean().item()
        if job.rank == 0:
            summary = {"accuracy": accuracy, "explained_variance": explained, "skipped": scaler.skipped}
            args.output.mkdir(parents=True, exist_ok=True)
            with (args.output / "metrics.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in (*metrics, {"summary": summary}))
            print(f"{scaler.skipped} updates skipped; {explained:.1%} of the held-out images' variance reconstructed")
            print(f"accuracy {accuracy:.4f}")
            if accuracy < GOAL:
                print(f"It is below the goal of {GOAL}: train longer, with --epochs.")
    return 0


def parse() -> argparse.Namespace:
    summary = "Train an autoencoder and a classifier on its code, with two optimizers and without the trainer."
    parser = argparse.ArgumentParser(description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--seed", type=int, default=0, help="seed of the weights and the order of the data")
    add("--epochs", type=int, default=25, help="passes over the training images")
    add("--precision", choices=tuple(PRECISIONS), default="fp32", help="dtype of the forward pass")
    add("--output", type=Path, default=Path("outputs/own_loop"), help="folder for metrics.jsonl")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error("--epochs must be 1 or more")
    return args


if __name__ == "__main__":
    try:
        sys.exit(run(parse()))
    except accelcore.AccelError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)

"""Two losses with scales of their own; as a script, one rank of a job: `own_scale_ranks.py FOLDER`.

Each rank writes what it found to FOLDER/RANK.json; test_own_scales.py judges it. On rank 1 the second loss overflows.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from torch import nn

import accelcore
from accelcore import LossScale, Policy

PRECISIONS = {
    "fp32": "fp32",
    "fp16": Policy(autocast="float16", loss_scale=LossScale(init=1024.0)),
    "static": Policy(autocast="float16", loss_scale=128.0),
    "O2": Policy(model_dtype="float16", cast_boundary=True, loss_scale=LossScale(init=1024.0)),
    "O2, static": Policy(model_dtype="float16", cast_boundary=True, loss_scale=128.0),
}


class Two(nn.Module):
    """Two heads on a body; the second is only in the second loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return self.one(hidden), self.two(hidden)


def losses(model, x):
    one, two = model(x)
    return one.float().square().mean(), two.float().mean()


def made(accel, precision, **options):
    model = Two()
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    return accel.trainer(model, optimizer, precision=PRECISIONS[precision], **options)


def micro(trainer, x, factor=1.0, names=(None, "two")):
    with trainer.autocast():
        first, second = losses(trainer.forward, x)
    trainer.backward(first, scale=names[0], retain_graph=True)
    trainer.backward(second * factor, scale=names[1])
    trainer.update()


def data(count=4):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(8, 4, generator=generator) for _ in range(count)]


def main(folder: Path) -> None:
    accel = accelcore.select("cpu")
    with accel.distributed() as job:
        found = {}
        for precision in ("fp16", "O2"):
            trainer = made(accel, precision, parallel="combine_ddp")
            micro(trainer, data()[job.rank], math.inf if job.rank else 1.0)
            micro(trainer, data()[job.rank], 3.0)
            found[precision] = {
                "weights": [parameter.tolist() for parameter in trainer.model.parameters()],
                "skipped": trainer.skipped,
                "scales": [scaler.state_dict()["scale"] for scaler in (trainer.scaler, trainer.loss_scales["two"])],
            }
        trainer = made(accel, "fp16", parallel="ddp")
        try:
            trainer.backward(losses(trainer.forward, data()[0])[0], scale="one")
        except accelcore.UnsupportedError as error:
            found["refused"] = error.remedy
        (folder / f"{job.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Draw docs/parity.svg: the loss of a recorded run and of its replay with a wrong kernel.

    python -m benchmarks.draw_parity docs/parity.svg

torch 2.13's fused SGD kernel for the CPU leaves most elements of bf16 parameters as they were. The program records SGD
without it, replays with it, prints what is named, and draws both losses.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import accelcore


def train(context, *, fused: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
    losses = []
    for _ in range(30):
        inputs = torch.randn(32, 16).bfloat16()
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sin()).square().mean()
        context.loss(loss.detach())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        with accelcore.Record(f"{folder}/ref") as record:
            recorded = train(record, fused=False)
        with accelcore.Replay(f"{folder}/ref") as replay:
            replayed = train(replay, fused=True)
    print(replay.result)
    for each in replay.result.settings:
        print(f"{each.name}: {each.recorded} -> {each.replayed}")
    print(replay.result.next)
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(recorded, label="recorded: SGD by loop")
    axes.plot(replayed, "--", label="replayed: SGD(fused=True)")
    axes.set(xlabel="step", ylabel="loss", title="bf16 parameters, CPU, torch 2.13.0")
    axes.legend()
    figure.savefig(Path(sys.argv[1]), metadata={"Date": None})


if __name__ == "__main__":
    main()

"""Experiments with ranks: two that share one device over gloo, and one of NCCL."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import accelcore
from benchmarks.gpu.device import Device

__all__ = ["one_rank_of_nccl", "two_ranks_on_one_gpu"]

_STRATEGIES = ("ddp", "combine_ddp", "zero1")
_STEPS = 20


def two_ranks_on_one_gpu(device: Device) -> dict[str, Any]:
    """Train by each strategy on two ranks that share the device, and compare the weights with one process's."""
    expected = _trained(device.accel, "none", rank=0, ranks=1)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "benchmarks.gpu.experiments_ranks", device.type]
    ranks = [
        subprocess.Popen(
            command, env={**environment, "RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    try:
        texts = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    outcomes = {"status": [rank.returncode for rank in ranks]}
    weights = {name: torch.tensor([float(part) for part in text.split()]) for name, text in _lines(texts[0])}
    return outcomes | {
        f"{name}: largest difference of a weight": float((found - expected).abs().max())
        for name, found in weights.items()
    }


def one_rank_of_nccl(device: Device) -> dict[str, Any]:
    """Reduce tensors of every dtype, a strided one too, in a job of one rank; wait at a barrier and leave."""
    if not device.cuda:
        return {"not run": "NCCL needs a GPU"}
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    outcomes: dict[str, Any] = {}
    for dtype in (torch.bool, torch.int64, torch.float64, torch.complex64, torch.bfloat16):
        outcomes[str(dtype)] = _outcome(torch.ones(8, device=device.torch).to(dtype))
    outcomes["strided"] = _outcome(torch.ones(8, 8, device=device.torch).t()[::2])
    dist.barrier(device_ids=[device.torch.index])
    dist.destroy_process_group()
    return outcomes


def _outcome(tensor: torch.Tensor) -> str:
    expected = tensor.clone()
    try:
        dist.all_reduce(tensor)
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return "kept" if torch.equal(tensor, expected) else "changed"


def _lines(text: str) -> list[tuple[str, str]]:
    return [(name, rest) for name, _, rest in (line.partition(": ") for line in text.splitlines()) if rest]


def _trained(accel: accelcore.Backend, parallel: str, *, rank: int, ranks: int) -> torch.Tensor:
    """Train on this rank's share of batches that are the same in every process. Return all weights."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)
    optimizer = accel.optimizers.create("adamw", model.to(accel.device).parameters(), lr=1e-3)
    trainer = accel.trainer(
        model, optimizer, loss=lambda model, batch: mse_loss(model(batch[0]), batch[1]), parallel=parallel
    )
    rows = 32 // ranks
    for _ in range(_STEPS):
        batch = torch.randn(2, 32, 32, generator=generator)[:, rank * rows : (rank + 1) * rows].to(accel.device)
        trainer((batch[0], batch[1]))
    return nn.utils.parameters_to_vector(model.parameters()).detach().cpu()


def main() -> None:
    """Train as one of the two ranks; rank 0 prints the weights."""
    rank, kind = int(os.environ["RANK"]), sys.argv[1]
    dist.init_process_group("cpu:gloo,cuda:gloo" if kind == "cuda" else "gloo")
    accel = accelcore.select(f"{kind}:0")
    with accel.distributed():  # adopts the group
        for strategy in _STRATEGIES:
            found = _trained(accel, strategy, rank=rank, ranks=2)
            if rank == 0:
                print(f"{strategy}: {' '.join(f'{value:.9g}' for value in found.tolist())}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Saving what four ranks have divided: each what it has, beside one rank that gathers all of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import accelcore
from benchmarks.on_ranks import on_ranks
from benchmarks.paired import compare, sample
from benchmarks.report import Goal, Row, Table

__all__ = ["run"]

RANKS = 4
WIDTH = 1024
GATHERED, PIECES, TORCH = "one rank gathers, by hand", "trainer.save, in pieces", "torch.distributed.checkpoint"


def run(megabytes: int, *, ranks: int = RANKS, width: int = WIDTH, rounds: int = 5) -> Iterator[Table]:
    """One table, of about so many megabytes of parameters and moments."""
    return on_ranks(ranks, _saved, megabytes, width, rounds)


def _saved(accel: accelcore.Backend, rank: int, megabytes: int, width: int, rounds: int) -> Iterator[Table]:
    layers = max(1, round(megabytes * 1e6 / (3 * 4 * width * (width + 1))))
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=1e-3)
    trainer = accel.trainer(
        model, optimizer, loss=lambda model, rows: model(rows).square().mean(), parallel=accelcore.FSDP(wrap=nn.Linear)
    )
    trainer(torch.randn(4, width))
    paths = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(paths)
    folder = Path(paths[0])
    cases: dict[str, Callable[[], object]] = {
        GATHERED: lambda: _gather(model, optimizer, rank, folder),
        PIECES: lambda: trainer.save(folder / "ours", keep=1),
        TORCH: lambda: _save_by_torch(model, optimizer, folder),
    }
    try:
        timings = compare(sample(cases, rounds=rounds, ready=dist.barrier), GATHERED)
        dist.barrier()
        written = sum(file.stat().st_size for file in (folder / "ours").rglob("*.safetensors"))
        notes = {
            GATHERED: "torch.save of a full state_dict, flushed",
            PIECES: "flushed, with digests, whole or not at all",
            TORCH: "flushed, without digests",
        }
        yield Table(
            title=f"{written / 1e6:.0f} MB of {dist.get_world_size()} ranks: one save",
            base=GATHERED,
            unit="ms",
            settings={
                "layers": layers,
                "width": width,
                "optimizer": "adamw",
                "ranks": dist.get_world_size(),
                "threads": 1,
                "process group": "gloo",
                "rounds": rounds,
                "clock": "perf_counter",
            },
            rows=[Row(name, timings[name], notes[name]) for name in cases],
            goals=[Goal(f"{PIECES} / {GATHERED}", 1.0, timings[PIECES].ratio.median)],
        )
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)


def _gather(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, folder: Path) -> None:
    """As one writes it with torch: all ranks send what they have to rank 0, which writes it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    if rank == 0:
        with (folder / "gathered.pt").open("wb") as file:
            torch.save({"model": of_model, "optimizer": of_optimizer}, file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()


def _save_by_torch(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    writer = dcp.FileSystemWriter(folder / "torch", overwrite=True)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, storage_writer=writer)

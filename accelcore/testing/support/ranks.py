"""Program of the suite's jobs: `python -m accelcore.testing.support.ranks FOLDER DEVICE DEVICE...`, run by `job.py`.

It imports what ranks need and forks them: the job of two ranks, then one of three if there are three devices. Each rank
writes the results of each part to FOLDER/RANKS/RANK.json, and what it says to FOLDER/RANKS/RANK.stderr; the tests that
started the jobs judge them. How a rank ended is in FOLDER/RANKS/RANK.code.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from itertools import product
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import accelcore
from accelcore.devices import SHARDED
from accelcore.optim.shards import is_sharded, to_local
from accelcore.testing.support.declared import LOW_PRECISION
from accelcore.testing.support.kinds import VIEWS
from accelcore.testing.support.large_collectives import of_large
from accelcore.testing.support.oracles import Stateful, batches, buffers, evaluated
from accelcore.testing.support.torch_collectives import called, in_groups

ROWS, STEPS = 16, 4
_PATIENCE = 15  # seconds, of a limit of one
LIMITS = {2: 180.0, 3: 60.0}  # seconds, by the number of ranks, after which a rank that has not ended is killed
_NEEDED = ("torch._dynamo", "torch.distributed.fsdp")  # what torch imports late, in every optimizer and in its shards
OPERATIONS = ("sum", "avg", "min", "max", "broadcast")
_INF = float("inf")
EXACT: dict[str, tuple[tuple[complex, ...], tuple[complex, ...]]] = {
    "float64": ((1 + 2.0**-50,), (1 + 2.0**-51,)),
    "float32": (
        (_INF, -_INF, -_INF, 1.0, 1 + 2.0**-23, 2.0**100),
        (1.0, 2.0, -_INF, -_INF, 1 + 3 * 2.0**-23, -(2.0**99)),
    ),
    "bfloat16": ((1 + 2.0**-7, 2.0**100, 2.0**-100), (1 + 3 * 2.0**-7, -(2.0**99), -(2.0**-101))),
    "float16": ((1 + 2.0**-10, 2.0**14, 2.0**-12, 2.0**-20), (1 + 3 * 2.0**-10, -(2.0**13), -(2.0**-13), -(2.0**-21))),
    "int64": ((2**53 + 1, -(2**62), 0), (2**53 + 3, 2**62, -1)),
    "int32": ((2**24 + 1, -(2**30), 0), (2**24 + 3, 2**30, -1)),
    "int8": ((101, -128, 0), (3, 127, -1)),
    "uint8": ((101, 0, 255), (103, 3, 0)),
    "bool": ((False, True), (True, True)),
    "complex64": ((1 + 2.0**-23 + 3j, 2j), (1 + 3 * 2.0**-23 - 1j, 2.0**100 + 1j)),
    "complex128": ((1 + 2.0**-50 + 3j,), (1 + 2.0**-51 - 1j,)),
}
"""Numbers of both ranks, by dtype, that need every digit of it, or lie at its ends."""


def _collectives(accel: accelcore.Backend, job: Any, folder: Path) -> dict[str, Any]:
    def tensor(*values: complex, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, device=accel.device, dtype=dtype)

    value = float(job.rank + 1)
    places = torch.arange(2**21 + 1, device=accel.device) % 1000 + 1.0  # so that no part may take another's place
    large = places * value
    found = {
        "rank": job.rank,
        "world_size": job.world_size,
        "device": str(accel.device),
        "large": job.all_reduce(large.clone()).cpu().div(places.cpu()).unique().tolist(),
        "integers": job.all_reduce(tensor(2**40 + job.rank, dtype=torch.int64)).tolist(),
        "parameter": job.all_reduce(nn.Parameter(tensor(value))).tolist(),
        "inf": job.all_reduce(tensor(float("inf") if job.rank else 1.0)).isinf().tolist(),
        "bounds": [*job.all_reduce(tensor(-value), "max").tolist(), *job.all_reduce(tensor(value), "min").tolist()],
        "exact": {
            f"{operation} {name}": _exact(job, operation, tensor(*pair[job.rank], dtype=getattr(torch, name)))
            for name, pair in EXACT.items()
            for operation in OPERATIONS
            if is_defined(operation, name)
        },
        "strides": [
            change(_laid_out(torch.arange(6.0, device=accel.device).view(2, 3) * value, job.rank)).tolist()
            for change in (
                job.all_reduce,
                lambda each: job.all_reduce(each, "max"),
                lambda each: job.broadcast(each, 1),
                _gathered,
            )
        ],
        "calls": called(accel.device, job.rank),
        "low": {name: _low(job, tensor(value, 6e4, dtype=getattr(torch, name))) for name in reduced(accel)},
        "views": {},
    }
    for operation, (kind, view), graph in product(OPERATIONS, VIEWS.items(), (False, True)):
        base = base_of(job.rank).to(accel.device)
        part = view(base).detach().requires_grad_(graph)
        try:
            returned = job.broadcast(part, 1) if operation == "broadcast" else job.all_reduce(part, operation)
            why = "" if returned is part else "what was returned is another tensor than was given"
        except RuntimeError as error:
            why = f"it raises {error}"
        found["views"].setdefault(f"{operation} {kind}", []).append([why, base.tolist()])
    whole = tensor(2**40 + job.rank, dtype=torch.int64)
    found["broadcast"] = [job.broadcast(tensor(value), source).tolist() for source in range(2)]
    found["broadcast"].append(job.broadcast(whole, 1).tolist())
    found["broadcast"].append(job.broadcast(large, 1).cpu().div(places.cpu()).unique().tolist())
    found["words"] = [job.is_main, job.local_rank, job.mean(value), job.mean(tensor(value, -value)).tolist()]
    several, none_on_rank_0 = tensor(*[value] * (job.rank + 1)), [tensor(value)] * job.rank
    gathered = [job.gather(rows) for rows in (several, torch.tensor(value), none_on_rank_0)]
    exact = tensor(2**40 + job.rank, 1, dtype=torch.int64).expand(job.rank + 1, 2)
    gathered.insert(0, job.gather(exact))
    found["gathered"], found["gathered_on"] = [rows.tolist() for rows in gathered], gathered[-1].device.type
    group = job.cpu_group()
    on_host = torch.tensor([value])
    dist.all_reduce(on_host, group=group)
    found["cpu_group"] = on_host.tolist()
    here, late = folder / "rank 0 is here", folder / "rank 1 is here"
    if job.rank == 0:
        here.touch()
        accel.collectives.barrier()  # the job's own would wait for the ranks itself
        found["waited"] = late.exists()
    else:
        while not here.exists():
            time.sleep(0.01)
        late.touch()
        accel.collectives.barrier()
    found["drawn"] = [_drawn(accel, seed) for seed in (7, 7 + job.rank)]
    return found


def _laid_out(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a matrix in the strides of a rank: transposed on rank 1."""
    return matrix.t().contiguous().t() if rank else matrix


def _gathered(matrix: torch.Tensor) -> torch.Tensor:
    """Return rank 1's matrix by torch's all_gather, which may refuse other strides than contiguous ones."""
    parts = [torch.empty(matrix.shape, device=matrix.device) for _ in range(2)]
    try:
        dist.all_gather(parts, matrix)
    except (RuntimeError, ValueError):
        dist.all_gather(parts, matrix.contiguous())
    return parts[1]


def _waits(job: Any, sign: Path) -> bool:
    """Return whether rank 0 waits for rank 1 on the host for many times the job's limit."""
    if job.rank:
        start = time.monotonic()
        while not sign.exists() and time.monotonic() < start + _PATIENCE:
            time.sleep(0.01)
        if sign.exists():
            return False
    try:
        dist.all_reduce(torch.ones(1), group=job.cpu_group())
    except RuntimeError:
        return False
    finally:
        sign.touch()
    return True


def _drawn(accel: accelcore.Backend, seed: int) -> list[float]:
    """Return random numbers, and a mask of dropout, after seeding."""
    accel.runtime.seed(seed)
    numbers, ones = torch.rand(8, device=accel.device), torch.ones(64, device=accel.device)
    return torch.cat([numbers, nn.functional.dropout(ones)]).tolist()


def _exact(job: Any, operation: str, tensor: torch.Tensor) -> list[float] | str:
    """Return what an operation makes of numbers, or the error with which it refuses the dtype."""
    try:
        found = job.broadcast(tensor, 1) if operation == "broadcast" else job.all_reduce(tensor, operation)
        values: list[float] = as_real(found).tolist()
    except (RuntimeError, accelcore.AccelError) as error:
        return f"refused: {error}"
    return values


def is_defined(operation: str, dtype: str) -> bool:
    """Return whether numbers of a dtype have an average, a sum or an order."""
    if dtype.startswith("complex"):
        return operation in ("sum", "broadcast")
    return dtype in ("float64", "float32") or (operation != "avg" and (dtype, operation) != ("bool", "sum"))


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the real and imaginary parts of complex numbers apart."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _low(job: Any, tensor: torch.Tensor) -> list[list[float]]:
    """Return the sum over ranks of the first element, and the average of both."""
    return [job.all_reduce(tensor[:1].clone()).tolist(), job.all_reduce(tensor.clone(), "avg").tolist()]


def reduced(accel: accelcore.Backend) -> list[str]:
    """Return the declared low-precision dtypes that gradients may have."""
    known = accel.capabilities
    return [name for name in LOW_PRECISION if name in (*known.model_dtypes, *known.autocast_dtypes)]


def base_of(rank: int) -> torch.Tensor:
    """Return the matrix of which a rank reduces views; neither rank's is larger everywhere."""
    signs = torch.tensor([1.0, -1.0]).repeat(12) * (1 - 2 * rank)
    return ((torch.arange(24.0) + 1) * (rank + 1) * signs).reshape(4, 6)


def share(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a rank's half of each batch."""
    part = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    return [(rows[part], classes[part]) for rows, classes in batches(STEPS, ROWS)]


class Partly(Stateful):
    """Model with a layer that some batches do not use, and another that none uses."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.sometimes, self.never = nn.Linear(4, 4), nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor, use: bool = False) -> torch.Tensor:
        """Return logits; with `use`, through the layer that some batches do not use."""
        logits = super().forward(rows)
        return logits + self.sometimes(logits) if use else logits


def uses(rank: int, number: int) -> bool:
    """Return whether a rank uses the layer: rank 0 in its first batch, rank 1 in every second one."""
    return number == 0 if rank == 0 else number % 2 == 1


def _replicated(accel: accelcore.Backend, job: Any) -> dict[str, Any]:
    """Return a rank's gradient and weight of a replica, after backward on the rank's own rows."""
    module = nn.Linear(2, 2**18 + 1, bias=False)
    nn.init.constant_(module.weight, 1.0 + job.rank)
    rows = torch.full((1, 2), 1.0 + job.rank, device=accel.device)
    replica = accel.replicate(module)
    replica(rows).sum().backward()
    assert module.weight.grad is not None, "backward left no gradient"
    return {"gradient": torch.unique(module.weight.grad).tolist(), "weight": torch.unique(module.weight).tolist()}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate": 2},
    "short": {"accumulate": 3},
    "flat": {"accumulate": 2, "flat": True},
}
"""Options of the trainer with which two ranks train one model, by name."""


def variants_of(strategy: str) -> dict[str, dict[str, Any]]:
    """Return the variants that a strategy supports: sharded parameters cannot be flat."""
    return {name: options for name, options in VARIANTS.items() if strategy not in SHARDED or "flat" not in options}


def _trained(accel: accelcore.Backend, job: Any, strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return what a rank has after `STEPS` micro-batches. Ranks start with different weights."""
    model = Partly(seed=job.rank)
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.5)
    trainer = accel.trainer(model, optimizer, parallel=strategy, **options)
    local: list[list[float]] = []
    for number, batch in enumerate(share(job.rank)):
        rows, classes = accel.runtime.to_device(batch)
        with trainer.autocast():
            loss = nn.functional.cross_entropy(trainer.forward(rows, uses(job.rank, number)), classes)
        trainer.backward(loss)
        gradient = model.entry.weight.grad
        assert gradient is not None, "backward left no gradient"
        local.append(to_local(gradient).flatten()[:4].tolist())
        trainer.update()
    trainer.flush()
    return {
        "weights": {name: _whole(parameter).cpu().tolist() for name, parameter in model.named_parameters()},
        "elements": sum(to_local(parameter).numel() for parameter in model.parameters()),
        "moments": sum(
            to_local(value).numel()
            for entry in optimizer.state.values()
            for value in entry.values()
            if isinstance(value, torch.Tensor) and value.dim()
        ),
        "buffers": {name: buffer.tolist() for name, buffer in buffers(model).items()},
        "evaluated": evaluated(model, accel.device).tolist(),
        "gradients": local,
        "steps": trainer.steps,
    }


def _statistics(accel: accelcore.Backend, job: Any) -> list[float] | None:
    """Return the means of torch's SyncBatchNorm after unequal batches of `share`; None if it is refused."""
    strategies = [strategy for strategy in accel.capabilities.parallel if strategy != "none"]
    rows = accel.runtime.to_device(share(job.rank)[0][0][job.rank :])
    model = nn.Sequential(nn.SyncBatchNorm(rows.shape[1], momentum=1.0))
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    try:
        trainer = accel.trainer(model, optimizer, parallel=strategies[0])
        outputs = trainer.forward(rows)
    except (ValueError, RuntimeError, NotImplementedError):
        return None
    trainer.backward(outputs.square().mean())
    means: list[float] = buffers(model)["0.running_mean"].tolist()
    return means


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole.detach()


def main() -> int:
    """Fork the ranks before anything here has touched a device or run in parallel; return whether one failed."""
    folder, *devices = Path(sys.argv[1]), *sys.argv[2:]
    for module in _NEEDED:
        import_module(module)
    failed = job_failed(_rank_of_two, devices[:2], folder / "2")
    return int((len(devices) > 2 and job_failed(_rank_of_three, devices, folder / "3")) or failed)


def job_failed(target: Callable[[int, str, Path], None], devices: list[str], folder: Path) -> bool:
    """Run a job with a rank for each device, and kill ranks that hang; return whether a rank failed."""
    folder.mkdir()
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_rank, args=(target, *each, folder)) for each in enumerate(devices)]
    for process in processes:
        process.start()
    left, limit = dict(enumerate(processes)), LIMITS[len(devices)]
    end = time.monotonic() + limit
    while left and (ended := connection.wait([each.sentinel for each in left.values()], end - time.monotonic())):
        for rank in [rank for rank, process in left.items() if process.sentinel in ended]:
            left[rank].join()
            (folder / f"{rank}.code").write_text(str(left.pop(rank).exitcode))
    for rank, process in left.items():
        process.kill()
        process.join()
        (folder / f"{rank}.code").write_text(f"no end within {limit:g} seconds")
    return any(process.exitcode for process in processes)


def _rank(target: Callable[[int, str, Path], None], rank: int, device: str, folder: Path) -> None:
    """Run a rank that says where it is before it is killed because it hangs."""
    with (folder / f"{rank}.stderr").open("wb") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    faulthandler.dump_traceback_later(LIMITS[int(folder.name)] * 0.9, file=sys.stderr.fileno())
    target(rank, device, folder)


def _rank_of_three(rank: int, device: str, folder: Path) -> None:
    """Form the job of three ranks, and groups of two of them."""
    accel = accelcore.select(device)
    meet = f"file://{folder.resolve()}/meet"
    with accel.distributed(rank=rank, world_size=3, init_method=meet, timeout=timedelta(seconds=LIMITS[3] / 2)):
        found = in_groups(accel, rank)
    (folder / f"{rank}.json").write_text(json.dumps({"groups": found}), encoding="utf-8")


def _rank_of_two(rank: int, device: str, folder: Path) -> None:
    """Form the job, do everything that the backend declares, and write the results."""
    accel = accelcore.select(device)
    meet = f"file://{folder.resolve()}/meet"
    found: dict[str, Any] = {}

    def note(part: str, value: Any) -> None:
        found[part] = value
        unfinished = folder / f"{rank}.part"
        unfinished.write_text(json.dumps(found), encoding="utf-8")
        unfinished.replace(folder / f"{rank}.json")  # if a later part fails, the tests of this one are judged

    with accel.distributed(rank=rank, world_size=2, init_method=meet, timeout=timedelta(seconds=60)) as job:
        note("collectives", _collectives(accel, job, folder))
        if "ddp" in accel.capabilities.parallel:
            note("replicated", _replicated(accel, job))
        for strategy in accel.capabilities.parallel:
            if strategy != "none":
                options_of = variants_of(strategy).items()
                note(strategy, {name: _trained(accel, job, strategy, options) for name, options in options_of})
        note("statistics", _statistics(accel, job))
        note("large", of_large(job, accel.device))
    closed = {"open": dist.is_initialized(), "waits": False}
    again = accel.distributed(rank=rank, world_size=2, init_method=f"{meet}-again", timeout=1)
    with suppress(accelcore.DistributedError), again as job:  # a group in which a rank was late is of no use
        closed["waits"] = _waits(job, folder / "rank 0 waited")
    note("closed", closed)


if __name__ == "__main__":
    sys.exit(main())

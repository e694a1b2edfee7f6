"""Questions about CUDA that reading cannot answer: each takes a few seconds, in a process of its own.

    python -m benchmarks.gpu.experiments NAME --device cuda

prints what was found as JSON. `stage_experiments` runs all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import accelcore
from accelcore.errors import AccelError
from benchmarks.gpu import loops, stage_gpt, stage_step
from benchmarks.gpu.device import Device
from benchmarks.gpu.experiments_ranks import one_rank_of_nccl, two_ranks_on_one_gpu
from benchmarks.gpu.gpt import GPT, GPT2_124M, Shape
from benchmarks.gpu.loops import Mode, Pass
from benchmarks.gpu.measure import first_line
from benchmarks.paired import compare, sample

__all__ = ["EXPERIMENTS", "main"]

Found = dict[str, Any]
_TOY = Shape(layers=1, heads=2, width=16, context=8, vocabulary=64)


def probe(device: Device) -> Found:
    """Compare what the plugin's probe reports with what torch finds."""
    answer = accelcore.installed()["cuda"]
    return {"available": answer.available, "reason": answer.reason, "torch": torch.cuda.is_available()}


def stale_gradient_accumulators(device: Device) -> Found:
    """Capture a step while a graph of the default stream, made before the trainer, is still alive."""
    model, batch = _network(device), _batch(device)
    kept = mse_loss(model(batch[0]), batch[1])
    trainer = _trainer(device, model, graph=device.accel.capabilities.graphs)
    try:
        losses = [float(trainer(batch)) for _ in range(6)]
    except AccelError as error:
        return {"refused": error.what, "remedy": error.remedy}
    return {"losses": losses, "kept": float(kept.detach())}


def captured_steps_and_loaders(device: Device) -> Found:
    """Train with workers, pinned batches, dropout and fp16, eager and captured; the memory with one graph and two."""
    precision = "fp16" if device.cuda else "bf16"
    data = TensorDataset(torch.randn(640, 32), torch.randn(640, 32))
    found: Found = {}
    for accumulate in (1, 2):
        for graph in (False, True) if device.accel.capabilities.graphs else (False,):
            device.forget()
            torch.manual_seed(0)
            model = nn.Sequential(_network(device), nn.Dropout(0.1))
            trainer = _trainer(device, model, graph=graph, precision=precision, accumulate=accumulate)
            loader = DataLoader(data, batch_size=32, num_workers=2, pin_memory=device.cuda, drop_last=True)
            losses, held = [], []
            for _ in range(2 if device.toy else 15):
                for batch in trainer.batches(loader):
                    losses.append(float(trainer(batch)))
                held.append(device.held() or 0)
            found[f"accumulate={accumulate}, graph={graph}"] = {
                "finite": all(map(torch.isfinite, map(torch.tensor, losses))),
                "first": losses[0],
                "last": losses[-1],
                "held_bytes_grew": held[-1] - held[1],
                "peak_bytes": device.peak(),
            }
    return found


def mix_order_reduction(device: Device) -> Found:
    """Time GPT-2 compiled to bf16 with inductor's mix_order_reduction on and off."""
    passes = {}
    for switch in (False, True):
        options = {"options": {"triton.mix_order_reduction": switch}} if device.cuda else device.compile_options()
        work = stage_gpt.make_work(device, _shape(device), 1 if device.toy else 16)
        passes[f"mix_order_reduction={switch}"] = loops.by_hand(work, Mode("bf16", compile=options), device)
    return _timed(passes, device)


def fused_adamw(device: Device) -> Found:
    """Measure torch's AdamW, fused, foreach and compiled, in bytes a second, as a graph and by the host."""
    with torch.device("meta"):
        gpt = [tuple(parameter.shape) for parameter in GPT(_shape(device)).parameters()]
    size = 2**10 if device.toy else 21_000_000
    lists = {"1 tensor": [(size,)], "10 tensors": [(size // 10,)] * 10, "GPT-2's": gpt}
    source = torch.randn(size, device=device.torch)
    target = torch.empty_like(source)
    passes: dict[str, Callable[[], object]] = {"copy": _captured(device, lambda: target.copy_(source))}
    moved = {"copy": 8 * size}
    for name, shapes in lists.items():
        for kind in ("fused", "foreach", "compiled") if device.cuda else ("fused", "foreach"):
            values = [nn.Parameter(torch.randn(shape, device=device.torch)) for shape in shapes]
            for value in values:
                value.grad = torch.randn_like(value)
            capturable = {"capturable": True} if device.cuda else {}
            optimizer = torch.optim.AdamW(values, fused=kind == "fused", foreach=kind != "fused", **capturable)
            step = torch.compile(optimizer.step) if kind == "compiled" else optimizer.step
            case = f"{kind}, {name}"
            passes[case], passes[f"{case}, launched by the host"] = _captured(device, step), step
            moved |= dict.fromkeys((case, f"{case}, launched by the host"), 28 * sum(map(Tensor.numel, values)))
    found = _timed(passes, device)
    return {name: {**found[name], "bytes_per_second": moved[name] / found[name]["seconds"]} for name in found}


def waits(device: Device) -> Found:
    """List the options with which a step makes the host wait for the GPU."""
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "clip_norm": {"clip_norm": 1.0},
        "O2": {"precision": "O2"},
        "lamb": {"optimizer": "lamb"},
        "weight": {"weight": lambda batch: torch.ones((), device=device.torch)},
        **(
            {"reduce-overhead": {"compile": device.compile_options("reduce-overhead")}}
            if device.cuda and not device.toy
            else {}
        ),
    }
    found: Found = {}
    for name, options in cases.items():
        trainer, batch = _trainer(device, _network(device), **{"precision": "bf16", **options}), _batch(device)
        for _ in range(5):
            trainer(batch)
        try:
            with _no_waiting(device):
                for _ in range(20):
                    trainer(batch)
        except RuntimeError as error:
            found[name] = first_line(error)
        else:
            found[name] = "waits for nothing" if device.cuda else "not checked: only CUDA reports waits"
    return found


def launches(device: Device) -> Found:
    """Count the kernels and launches of a step, by hand and by the trainer."""
    from torch.profiler import ProfilerActivity, profile

    found: Found = {}
    for precision in ("fp32", "bf16", "fp16") if device.cuda else ("fp32", "bf16"):
        for name, loop in (("by hand", loops.by_hand), ("trainer", loops.with_trainer)):
            train = loop(stage_step.make_work(device, lr=1e-3), Mode(precision), device)
            train()
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.cuda else [])]
            with profile(activities=kinds) as profiled:
                train()
                device.clock()
            events = profiled.events() or []
            found[f"{precision}, {name}"] = {
                "kernels": sum(event.device_type == torch.autograd.DeviceType.CUDA for event in events),
                "launches": sum("LaunchKernel" in event.name for event in events),
                "operators": sum(event.name.startswith("aten::") for event in events),
            }
    return found


def warnings_of_the_compiler(device: Device) -> Found:
    """Compile a step of GPT-2 in fp32 and bf16 with warnings as errors."""
    import warnings

    found: Found = {}
    for precision in ("fp32", "bf16"):
        torch.compiler.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            work = stage_gpt.make_work(device, _TOY, 2)
            try:
                loops.with_trainer(work, Mode(precision, compile=device.compile_options()), device)()
            except Warning as warning:
                found[precision] = first_line(warning)
            else:
                found[precision] = "no warning"
    return found


def memory_of_prefetched_steps(device: Device) -> Found:
    """Train 200 prefetched steps without waiting: by how much does the memory that torch reserves grow?"""
    trainer = _trainer(device, _network(device, width=1024))
    data = TensorDataset(torch.randn(6400, 1024), torch.randn(6400, 1024))
    loader = DataLoader(data, batch_size=32, pin_memory=device.cuda)
    reserved = []
    for number, batch in enumerate(trainer.batches(loader)):
        trainer(batch)
        if device.cuda and number in (10, 100, 199):
            reserved.append(torch.cuda.memory_reserved(device.torch))
    device.clock()
    return {"reserved_bytes": reserved}


def table_o1(device: Device) -> Found:
    """Time a step of GPT-2 by table O1 in fp16 beside torch.autocast by hand, at small and at larger batches."""
    found: Found = {}
    precision = "O1" if device.cuda else accelcore.Policy(autocast="bfloat16", table="O1")
    for size in (1,) if device.toy else (1, 8):
        hand, ours = (stage_gpt.make_work(device, _shape(device), size) for _ in range(2))
        optimizer = torch.optim.AdamW(ours.model.parameters(), lr=1e-4, fused=True)
        trainer = device.accel.trainer(ours.model, optimizer, loss=ours.loss, precision=precision)
        passes: dict[str, Pass] = {
            "by hand": loops.by_hand(hand, Mode("fp16" if device.cuda else "bf16"), device),
            "O1": lambda trainer=trainer, batch=ours.batches[0]: trainer(batch),  # type: ignore[misc]
        }
        found[f"batch of {size}"] = _timed(passes, device)
    return found


EXPERIMENTS: dict[str, Callable[[Device], Found]] = {
    "E1": probe,
    "E2": stale_gradient_accumulators,
    "E3": captured_steps_and_loaders,
    "E4": mix_order_reduction,
    "E5": fused_adamw,
    "E6": waits,
    "E7": launches,
    "E8": warnings_of_the_compiler,
    "E9": two_ranks_on_one_gpu,
    "E10": one_rank_of_nccl,
    "E11": memory_of_prefetched_steps,
    "E12": table_o1,
}


def main() -> int:
    """Run one experiment and print what it found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.experiments", description=__doc__)
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument("--device", required=True, choices=["cuda", "cpu"])
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    found = EXPERIMENTS[options.name](Device(options.device, toy=options.toy))
    print(json.dumps(found))
    return 0


def _shape(device: Device) -> Shape:
    return _TOY if device.toy else GPT2_124M


def _network(device: Device, width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(device.torch)


def _batch(device: Device, width: int = 32) -> tuple[Tensor, Tensor]:
    return torch.randn(32, width, device=device.torch), torch.randn(32, width, device=device.torch)


def _trainer(device: Device, model: nn.Module, optimizer: str = "adamw", **options: Any) -> Any:
    made = device.accel.optimizers.create(optimizer, model.parameters(), lr=1e-3)
    return device.accel.trainer(model, made, loss=lambda model, batch: mse_loss(model(batch[0]), batch[1]), **options)


@contextmanager
def _no_waiting(device: Device) -> Iterator[None]:
    if not device.cuda:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _captured(device: Device, step: Callable[[], object]) -> Callable[[], object]:
    """Return the step as a CUDA graph, so that only the GPU's time counts; on the CPU, the step."""
    if not device.cuda:
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _timed(passes: dict[str, Any], device: Device) -> Found:
    """Time the passes in turns: the median of the seconds, and the median ratio to the first."""
    rounds, seconds = (2, 0.0) if device.toy else (15, 0.1)
    base = next(iter(passes))
    timings = compare(sample(passes, rounds=rounds, seconds=seconds, clock=device.clock), base)
    return {name: {"seconds": one.seconds.median, "ratio": one.ratio.median} for name, one in timings.items()}


if __name__ == "__main__":
    sys.exit(main())

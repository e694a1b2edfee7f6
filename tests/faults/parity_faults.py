"""Faults planted into replays of small trainings: `python -m tests.faults.parity_faults --faults 1000 --seed 0`.

Each case is drawn by its number: a model, a kind of pair, a fault and where it is planted. The training is recorded,
and replayed with the fault and without it. A fault is *named* if the result has the right step, phase, module and, if
the fault has them, rank and operator; *seen* if the result has another place; *setting* if the runs agree, but a
setting of the module is listed as different; else *missed*. A difference without the fault is an *alarm*. Counts by
kind go to parity_faults.json.

Pairs with the emulated NPU need it in this process: `accelcore run --emulate npu -m tests.faults.parity_faults ...`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import accelcore
from accelcore.parity.compare import compare

sys.path.insert(0, str(Path(__file__).parent))

from parity_models import MODELS
from parity_plans import FAULTS, STEPS, Plan, Run, drawn

PAIRS = tuple(f"{kind} {dtype}" for kind in ("cpu", "compiled", "npu", "1to2", "2to2") for dtype in ("fp32", "bf16"))
"""CPU to CPU, eager to compiled, CPU to emulated NPU, one rank to two, two ranks to two."""


def train(watch: Any, name: str, dtype: str, plan: Plan | None, *, device: str, compiled: bool, seed: int) -> None:
    """Train the model under a Record or Replay, which is made by `watch(model=, optimizer=)`."""
    task, draw = MODELS[name], torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = task.make().to(device)
    if "RANK" in os.environ:  # how a batch is divided would change masks and statistics
        for module in model.modules():
            module.train(not isinstance(module, nn.Dropout | nn.BatchNorm2d))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run, ranks, rank = Run(model, optimizer), 1, 0
    if dist.is_initialized():
        ranks, rank = dist.get_world_size(), dist.get_rank()
    batches = {step: task.batch(draw) for step in range(1, STEPS + 1)}
    called: Any = torch.compile(model, backend="aot_eager") if compiled else model
    plan = plan or Plan(0, "")
    with ExitStack() as stack:
        stack.enter_context(watch(model=called, optimizer=optimizer))
        for step in range(1, STEPS + 1):
            inputs, targets = (part[rank::ranks].to(device) for part in batches[plan.batch(step)])
            plan.before_forward(step, run)
            optimizer.zero_grad()
            # All of the step: recording begins in its forward pass and ends before its update, and the modes of torch's
            # dispatcher must be left in order.
            with plan.around(step, run):
                with torch.autocast(inputs.device.type, torch.bfloat16, enabled=dtype == "bf16"):
                    loss = task.loss(called(inputs), targets)
                loss.backward()
                for each, parameter in model.named_parameters() if ranks > 1 else ():
                    own = parameter.grad.clone()
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= ranks
                    plan.reduced(step, rank, each, own, parameter.grad)
                plan.before_update(step, run)
                optimizer.step()


def replayed(folder: Path, name: str, pair: str, plan: Plan, seed: int) -> tuple[Any, Any]:
    """Record a training with the operators of a step, replay it with and without the fault, and return both results."""
    kind, dtype = pair.split()
    rank = int(os.environ.get("RANK", 0))
    everywhere: Any = "everywhere" if kind == "npu" else None
    operators = [] if kind in ("compiled", "1to2") else [plan.step]

    def record(**of: Any) -> Any:
        return accelcore.Record(folder / "ref", operators=operators, random=everywhere, **of)

    if kind == "2to2":
        _meet(folder, rank)
    if rank == 0 or kind == "2to2":
        train(record, name, dtype, None, device="cpu", compiled=False, seed=seed)
    if kind == "1to2":
        _meet(folder, rank)
    results = []
    for number, fault in enumerate((plan, None)):
        out = folder / str(number)
        if dist.is_initialized():
            dist.barrier()  # the recording is whole
        train(
            lambda out=out, **of: accelcore.Replay(folder / "ref", out=out, **of),
            name, dtype, fault, device="npu:0" if kind == "npu" else "cpu", compiled=kind == "compiled", seed=seed,
        )  # fmt: skip
        if dist.is_initialized():
            dist.barrier()
        results.append(compare(folder / "ref", out))
    if dist.is_initialized():
        dist.destroy_process_group()
    return results[0], results[1]


def _meet(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=2)


def verdict(result: Any, plan: Plan) -> str:
    """Return `"named"`, `"seen"` (another place was named), `"setting"` (only a setting was) or `"missed"`."""
    if result.agrees or result.phase == "settings":
        return "setting" if f"module {plan.module}" in [each.name for each in result.settings] else "missed"
    right = (
        result.step == plan.step
        and result.phase == plan.phase
        and plan.module in (None, result.module)
        and plan.rank in (None, result.rank)
        and (plan.operator is None or result.operator is None or result.operator.split(".")[0] == plan.operator)
    )
    return "named" if right else "seen"


def case(number: int, seed: int, pairs: Sequence[str], folder: Path) -> dict[str, Any]:
    """Plant one fault, replay with and without it, and return what came of it."""
    name, pair, fault, draw = drawn(number, seed, pairs)
    plan = FAULTS[fault](draw, MODELS[name].make())
    assert plan is not None, "it was drawn so"
    found: dict[str, Any] = {"case": number, "model": name, "pair": pair, "fault": fault, "step": plan.step}
    with_fault, clean = replayed(folder / f"{pair} {number}", name, pair, plan, seed=number)
    found |= {
        "verdict": verdict(with_fault, plan),
        "module": plan.module,
        "phase": plan.phase,
        "named": str(with_fault),
    }
    if not clean.agrees:
        found["alarm"] = str(clean)
    return found


def counts(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Return counts by fault, pair and model."""
    tables: dict[str, dict[str, Counter[str]]] = {key: defaultdict(Counter) for key in ("fault", "pair", "model")}
    for each in cases:
        for key, table in tables.items():
            table[each[key]][each["verdict"]] += 1
            table[each[key]]["alarms"] += "alarm" in each
    named = sum(each["verdict"] == "named" for each in cases)
    return {
        "planted": len(cases),
        "named": named,
        "clean pairs": len(cases),
        "alarms": sum("alarm" in each for each in cases),
        **{f"by {key}": {name: dict(found) for name, found in sorted(table.items())} for key, table in tables.items()},
        "not named": [each for each in cases if each["verdict"] != "named" or "alarm" in each],
    }


def added(one: Any, other: Any) -> Any:
    """Return the sum of two tables: of their numbers and lists, by name."""
    if not isinstance(one, dict):
        return one + other
    return {
        name: added(one[name], other[name]) if name in one and name in other else one.get(name, other.get(name))
        for name in sorted(one.keys() | other.keys())
    }


def cases(numbers: Sequence[int], seed: int, pairs: Sequence[str]) -> list[dict[str, Any]]:
    """Plant the faults of these numbers. Pairs with ranks run in two processes."""
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        ranked = [pair.split()[0] in ("1to2", "2to2") for pair in pairs]
        if not any(ranked):
            return [case(number, seed, pairs, Path(folder)) for number in numbers]
        assert all(ranked), "pairs with ranks are counted apart from the others"
        torch.multiprocessing.spawn(_rank, (numbers, seed, pairs, folder), nprocs=2)
        found: list[dict[str, Any]] = json.loads(Path(folder, "cases.json").read_text())
        return found


def _rank(rank: int, numbers: Sequence[int], seed: int, pairs: Sequence[str], folder: str) -> None:
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}  # nobody meets there
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), **job)
    torch.set_num_threads(1)
    found = [case(number, seed, pairs, Path(folder)) for number in numbers]
    if rank == 0:
        Path(folder, "cases.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pairs", default="cpu fp32,cpu bf16", help=f"of {', '.join(PAIRS)}")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("parity_faults.json"))
    parser.add_argument("--add", action="store_true", help="add to the counts of that table")
    given = parser.parse_args()
    torch.set_num_threads(1)
    pairs = tuple(given.pairs.split(","))
    if any(pair.startswith("npu") for pair in pairs):
        accelcore.select("npu")
    numbers = range(given.first, given.first + given.faults)
    run = {"seed": given.seed, "first": given.first, "faults": given.faults, "pairs": given.pairs}
    counted = {"runs": [run], **counts(cases(numbers, given.seed, pairs))}
    if given.add:
        before = json.loads(given.out.read_text())
        counted = added({name: before[name] for name in counted}, counted)
    report = {
        "when": datetime.now(timezone.utc).date().isoformat(), "python": platform.python_version(),
        "torch": torch.__version__, **counted,
    }  # fmt: skip
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: value for key, value in report.items() if key != "not named"}, indent=1))  # noqa: T201


if __name__ == "__main__":
    main()

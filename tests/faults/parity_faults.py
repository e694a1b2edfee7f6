"""Faults planted into replays of small trainings: `python -m tests.faults.parity_faults --faults 1000 --seed 0`.

Each case is drawn by its number: a model, a kind of pair, a fault and where it is planted. The training is recorded,
and replayed with the fault. It is *named* if the result has the right step, phase, module and, where it applies,
operator; *seen* if the result has another place; else *missed*. Each case is also replayed without the fault: any
difference is an *alarm*. Counts by kind go to parity_faults.json. With ranks, `torchrun` starts this program.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import accelcore

sys.path.insert(0, str(Path(__file__).parent))

from parity_models import MODELS, Scale

STEPS = 4
PAIRS = ("cpu fp32", "cpu bf16", "compiled fp32", "compiled bf16", "npu fp32", "npu bf16", "ranks fp32", "ranks bf16")
_COPIES = ("_to_copy", "empty", "new_", "detach", "clone", "copy_", "zeros", "ones", "fill_")
"""How the names of operators begin that compute nothing."""


@dataclass
class Plan:
    """A fault that is planted, and what a replay has to name.

    Attributes:
        before_forward, before_update: called in the replay at the start of each step, and before each update.
        around: a context around each step.
        batch: which batch a step takes.
        skips: the parameter whose gradient is not reduced in a step.
        names: phases that are right, and the module; None where several are right.
    """

    step: int
    phases: tuple[str, ...]
    module: str | None = None
    operator: str | None = None
    before_forward: Callable[[int, Any], None] = lambda step, run: None
    before_update: Callable[[int, Any], None] = lambda step, run: None
    around: Callable[[int, Any], Any] = lambda step, run: nullcontext()
    batch: Callable[[int], int] = lambda step: step
    skips: Callable[[int, str], bool] = lambda step, name: False
    seen: dict[str, str] = field(default_factory=dict)


@dataclass
class Run:
    """What a fault may reach into."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    old: dict[Tensor, Tensor] = field(default_factory=dict)


class _Wrong(TorchDispatchMode):
    """Change what the first computing operator within a module returns."""

    def __init__(self, module: nn.Module, change: Callable[[Tensor], Tensor], plan: Plan) -> None:
        super().__init__()
        self.plan, self.change, self.inside, self.done = plan, change, False, False
        self.hooks = [
            module.register_forward_pre_hook(lambda *_: self.enter(True)),
            module.register_forward_hook(lambda *_: self.enter(False)),
        ]

    def enter(self, inside: bool) -> None:
        self.inside = inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name
        first = found[0] if isinstance(found, tuple) else found
        computes = not func.is_view and not name.removeprefix("aten::").startswith(_COPIES)
        if self.inside and not self.done and computes and first.is_floating_point():
            self.done = True
            self.plan.operator = name
            first.copy_(self.change(first))
        return found


@contextmanager
def _wrong(module: nn.Module, change: Callable[[Tensor], Tensor], plan: Plan) -> Iterator[None]:
    mode = _Wrong(module, change, plan)
    try:
        with mode:
            yield
        assert mode.done, "the module has an operator that computes"
    finally:
        for hook in mode.hooks:
            hook.remove()


def _leaves(model: nn.Module, *kinds: type) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if name and isinstance(module, kinds)]


def _operator(change: Callable[[Tensor], Tensor], *kinds: type) -> Callable[[random.Random, nn.Module], Plan | None]:
    def plan(draw: random.Random, model: nn.Module) -> Plan | None:
        places = _leaves(model, *kinds)
        if not places:
            return None
        name, _ = draw.choice(places)
        step = draw.randint(1, STEPS)
        planned = Plan(step, ("forward",), name)
        planned.around = lambda now, run: (
            _wrong(run.model.get_submodule(name), change, planned) if now == step else nullcontext()
        )
        return planned

    return plan


def _few_ulp(found: Tensor) -> Tensor:
    return found + 4 * torch.finfo(found.dtype).eps * found.abs()


def _in_bf16(found: Tensor) -> Tensor:
    return found.bfloat16().to(found.dtype)


def _transposed(found: Tensor) -> Tensor:
    return found / _ramp(found) * _ramp(found).flip(-1)


def _ramp(found: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, found.shape[-1], dtype=found.dtype, device=found.device)


def eps(draw: random.Random, model: nn.Module) -> Plan | None:
    """A norm with an eps of 1e-3."""
    places = _leaves(model, nn.LayerNorm, nn.BatchNorm2d)
    if not places:
        return None
    name, _ = draw.choice(places)

    def change(step: int, run: Run) -> None:
        run.model.get_submodule(name).eps = 1e-3

    return Plan(1, ("forward",), name, before_forward=change)


def weights(draw: random.Random, model: nn.Module) -> Plan:
    """A layer whose weights are changed by a thousandth between two steps."""
    name = draw.choice([name for name, _ in model.named_parameters()])
    step = draw.randint(2, STEPS)

    def change(now: int, run: Run) -> None:
        if now == step:
            with torch.no_grad():
                run.model.get_parameter(name).mul_(1.02).add_(1e-2)

    return Plan(step, ("weights",), name.rpartition(".")[0], before_forward=change)


def mask(draw: random.Random, model: nn.Module) -> Plan | None:
    """Random numbers that are drawn before a step, so that dropout has another mask."""
    places = _leaves(model, nn.Dropout)
    if not places:
        return None
    step = draw.randint(1, STEPS)

    def change(now: int, run: Run) -> None:
        if now == step:
            torch.rand(1)

    return Plan(step, ("random",), before_forward=change)


def swapped(draw: random.Random, model: nn.Module) -> Plan:
    """Two batches in the reverse order."""
    step = draw.randint(1, STEPS - 1)
    return Plan(step, ("batch",), batch=lambda now: {step: step + 1, step + 1: step}.get(now, now))


def stale(draw: random.Random, model: nn.Module) -> Plan:
    """A moment of the optimizer that is what it was a step before."""
    name = draw.choice([name for name, _ in model.named_parameters()])
    step = draw.randint(3, STEPS)

    def change(now: int, run: Run) -> None:
        parameter = run.model.get_parameter(name)
        moment = run.optimizer.state[parameter].get("exp_avg_sq")
        if moment is not None:
            if now == step:
                moment.copy_(run.old[parameter])
            run.old[parameter] = moment.clone()

    return Plan(step, ("update",), name.rpartition(".")[0], before_update=change)


def statistics(draw: random.Random, model: nn.Module) -> Plan | None:
    """BatchNorm's running statistics, lost between two steps."""
    places = _leaves(model, nn.BatchNorm2d)
    if not places:
        return None
    name, _ = draw.choice(places)
    step = draw.randint(2, STEPS)

    def change(now: int, run: Run) -> None:
        if now == step:
            run.model.get_submodule(name).reset_running_stats()

    return Plan(step, ("weights",), name, before_forward=change)


def unreduced(draw: random.Random, model: nn.Module) -> Plan:
    """A gradient that is not averaged over the ranks."""
    name = draw.choice([name for name, _ in model.named_parameters()])
    step = draw.randint(1, STEPS)
    return Plan(step, ("collective",), name.rpartition(".")[0], skips=lambda now, each: now == step and each == name)


_ANY = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d, nn.LayerNorm, nn.BatchNorm2d, nn.Embedding, Scale)
FAULTS: dict[str, Callable[[random.Random, nn.Module], Plan | None]] = {
    "operator off by 4 ULP": _operator(_few_ulp, *_ANY),
    "wrong eps": eps,
    "skipped all_reduce": unreduced,
    "perturbed weights": weights,
    "bf16 accumulation": _operator(_in_bf16, nn.Linear, nn.Conv2d, nn.ConvTranspose2d),
    "another dropout mask": mask,
    "two batches swapped": swapped,
    "stale optimizer state": stale,
    "BatchNorm's statistics lost": statistics,
    "transposed scale": _operator(_transposed, Scale, nn.Linear),
}  # fmt: skip


def can_show(fault: str, pair: str) -> bool:
    """Return whether a fault can be told from rounding, or named at all, in this kind of pair."""
    kind, dtype = pair.split()
    if fault == "skipped all_reduce":
        return kind == "ranks"
    if fault == "operator off by 4 ULP":
        return kind in ("cpu", "ranks")  # to the bit; across devices rounding differs by as much
    if fault == "bf16 accumulation":
        return dtype == "fp32" and kind in ("cpu", "ranks")
    if fault in ("transposed scale", "wrong eps"):
        return kind != "compiled"  # the modules of compiled code are not seen
    return True


def drawn(number: int, seed: int, pairs: tuple[str, ...]) -> tuple[str, str, str, random.Random]:
    """Return the model, the pair and the fault of a case, and the generator that draws where."""
    draw = random.Random(f"{seed} {number}")
    while True:
        pair, fault, name = draw.choice(pairs), draw.choice(list(FAULTS)), draw.choice(list(MODELS))
        state = draw.getstate()
        if can_show(fault, pair) and FAULTS[fault](draw, MODELS[name].make()) is not None:
            draw.setstate(state)
            return name, pair, fault, draw


def train(watch: Any, name: str, pair: str, plan: Plan | None, *, device: str, compiled: bool, seed: int) -> Any:
    """Train the model under a Record or Replay, which is made by `watch(model=, optimizer=)`; return that."""
    kind, dtype = pair.split()
    task, draw = MODELS[name], torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = task.make().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run, ranked = Run(model, optimizer), kind == "ranks"
    batches = {step: task.batch(draw) for step in range(1, STEPS + 1)}
    called: Any = torch.compile(model, backend="aot_eager") if compiled else model
    with ExitStack() as stack:
        made = stack.enter_context(watch(model=called, optimizer=optimizer))
        for step in range(1, STEPS + 1):
            inputs, targets = batches[plan.batch(step) if plan else step]
            if ranked:
                share = slice(dist.get_rank(), None, dist.get_world_size())
                inputs, targets = inputs[share], targets[share]
            if plan is not None:
                plan.before_forward(step, run)
            optimizer.zero_grad()
            around = plan.around(step, run) if plan is not None else nullcontext()
            # All of the step: recording begins in its forward pass and ends before its update, and the modes of torch's
            # dispatcher must be left in order.
            with around:
                with torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=dtype == "bf16"):
                    loss = task.loss(called(inputs.to(device)), targets.to(device))
                loss.backward()
                for each, parameter in model.named_parameters() if ranked else ():
                    if plan is None or not plan.skips(step, each):
                        dist.all_reduce(parameter.grad)
                        parameter.grad /= dist.get_world_size()
                if plan is not None:
                    plan.before_update(step, run)
                optimizer.step()
    return made


def replayed(folder: Path, name: str, pair: str, plan: Plan | None, *, step: int, seed: int) -> Any:
    """Record a training with the operators of a step, replay it with the fault, and return the result."""
    kind = pair.split()[0]
    everywhere: Any = "everywhere" if kind == "npu" else None
    operators = [] if kind == "compiled" else [step]
    train(
        lambda **of: accelcore.Record(folder / "ref", operators=operators, random=everywhere, **of),
        name, pair, None, device="cpu", compiled=False, seed=seed,
    )  # fmt: skip
    replay = train(
        lambda **of: accelcore.Replay(folder / "ref", **of),
        name, pair, plan, device="npu:0" if kind == "npu" else "cpu", compiled=kind == "compiled", seed=seed,
    )  # fmt: skip
    return replay.result


def verdict(result: Any, plan: Plan) -> str:
    """Return `"named"`, `"seen"` with what was named instead, or `"missed"`."""
    if result.agrees:
        return "missed"
    right = (
        result.step == plan.step
        and result.phase in plan.phases
        and (plan.module is None or result.module == plan.module)
        and (plan.operator is None or result.operator is None or result.operator.split(".")[0] == plan.operator)
    )
    return "named" if right else "seen"


def case(number: int, seed: int, pairs: tuple[str, ...]) -> dict[str, Any]:
    """Plant one fault, replay with and without it, and return what came of it."""
    name, pair, fault, draw = drawn(number, seed, pairs)
    plan = FAULTS[fault](draw, MODELS[name].make())
    assert plan is not None, "it was drawn so"
    found: dict[str, Any] = {"case": number, "model": name, "pair": pair, "fault": fault, "step": plan.step}
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        with_fault = replayed(Path(folder, "fault"), name, pair, plan, step=plan.step, seed=number)
        clean = replayed(Path(folder, "clean"), name, pair, None, step=plan.step, seed=number)
    found |= {
        "verdict": verdict(with_fault, plan),
        "module": plan.module,
        "phase": plan.phases[0],
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pairs", default=",".join(pair for pair in PAIRS if pair.split()[0] in ("cpu", "compiled")))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("parity_faults.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    pairs = tuple(given.pairs.split(","))
    if any(pair.startswith("npu") for pair in pairs):
        accelcore.select("npu")
    ranks = any(pair.startswith("ranks") for pair in pairs)
    if ranks:
        dist.init_process_group("gloo")
    cases = [case(number, given.seed, pairs) for number in range(given.first, given.first + given.faults)]
    if not ranks or dist.get_rank() == 0:
        report = {
            "when": datetime.now(timezone.utc).date().isoformat(), "python": platform.python_version(),
            "torch": torch.__version__, "seed": given.seed, "pairs": pairs, **counts(cases),
        }  # fmt: skip
        given.out.write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps({key: value for key, value in report.items() if key != "not named"}, indent=1))  # noqa: T201
    if ranks:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

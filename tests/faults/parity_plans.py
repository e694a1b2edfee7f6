"""Faults that are planted into a replay: what each changes, and what the result has to name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from parity_models import MODELS, Scale
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FAULTS", "STEPS", "Plan", "Run", "drawn"]

STEPS = 4
_COPIES = ("_to_copy", "empty", "new_", "detach", "clone", "copy_", "zeros", "ones", "fill_")
"""How the names of operators begin that compute nothing."""


@dataclass
class Plan:
    """A fault that is planted, and what a replay has to name.

    Attributes:
        before_forward, before_update: called in the replay at the start of each step, and before each update.
        around: a context around each step.
        batch: which batch a step takes.
        reduced: called on each rank with the step, the rank, a parameter's name and two gradients: its own and the
            mean over the ranks, which it may change in place.
        phase, module, rank: what is right; None if it does not matter.
        operator: the operator that was changed, once it has run.
    """

    step: int
    phase: str
    module: str | None = None
    rank: int | None = None
    operator: str | None = None
    before_forward: Callable[[int, Any], None] = lambda step, run: None
    before_update: Callable[[int, Any], None] = lambda step, run: None
    around: Callable[[int, Any], Any] = lambda step, run: nullcontext()
    batch: Callable[[int], int] = lambda step: step
    reduced: Callable[[int, int, str, Tensor, Tensor], None] = lambda step, rank, name, own, mean: None


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
        planned = Plan(step, "forward", name)
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

    return Plan(1, "forward", name, before_forward=change)


def weights(draw: random.Random, model: nn.Module) -> Plan:
    """A layer whose weights are changed by a thousandth between two steps."""
    name = draw.choice([name for name, _ in model.named_parameters()])
    step = draw.randint(2, STEPS)

    def change(now: int, run: Run) -> None:
        if now == step:
            with torch.no_grad():
                run.model.get_parameter(name).mul_(1.02).add_(1e-2)

    return Plan(step, "weights", name.rpartition(".")[0], before_forward=change)


def mask(draw: random.Random, model: nn.Module) -> Plan | None:
    """Random numbers that are drawn before a step, so that dropout has another mask."""
    places = _leaves(model, nn.Dropout)
    if not places:
        return None
    step = draw.randint(1, STEPS)

    def change(now: int, run: Run) -> None:
        if now == step:
            torch.rand(1)

    return Plan(step, "random", before_forward=change)


def swapped(draw: random.Random, model: nn.Module) -> Plan:
    """Two batches in the reverse order."""
    step = draw.randint(1, STEPS - 1)
    return Plan(step, "batch", batch=lambda now: {step: step + 1, step + 1: step}.get(now, now))


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

    return Plan(step, "update", name.rpartition(".")[0], before_update=change)


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

    return Plan(step, "weights", name, before_forward=change)


def unreduced(draw: random.Random, model: nn.Module) -> Plan:
    """A gradient that is not averaged over the ranks."""
    return _collective(draw, model, None, lambda own, mean: mean.copy_(own))


def lost(draw: random.Random, model: nn.Module) -> Plan:
    """An average over the ranks of which one rank has lost the second half."""

    def change(own: Tensor, mean: Tensor) -> None:
        half = mean.numel() // 2
        mean.view(-1)[half:] = own.view(-1)[half:]

    return _collective(draw, model, draw.randrange(2), change)


def _collective(
    draw: random.Random, model: nn.Module, wrong: int | None, change: Callable[[Tensor, Tensor], object]
) -> Plan:
    name = draw.choice([name for name, _ in model.named_parameters()])
    step = draw.randint(1, STEPS)

    def reduced(now: int, rank: int, each: str, own: Tensor, mean: Tensor) -> None:
        if now == step and each == name and wrong in (None, rank):
            change(own, mean)

    return Plan(step, "collective", name.rpartition(".")[0], wrong, reduced=reduced)


_ANY = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d, nn.LayerNorm, nn.BatchNorm2d, nn.Embedding, Scale)
FAULTS: dict[str, Callable[[random.Random, nn.Module], Plan | None]] = {
    "operator off by 4 ULP": _operator(_few_ulp, *_ANY),
    "wrong eps": eps,
    "skipped all_reduce": unreduced,
    "wrong all_reduce": lost,
    "perturbed weights": weights,
    "bf16 accumulation": _operator(_in_bf16, nn.Linear, nn.Conv2d, nn.ConvTranspose2d),
    "another dropout mask": mask,
    "two batches swapped": swapped,
    "stale optimizer state": stale,
    "BatchNorm's statistics lost": statistics,
    "transposed scale": _operator(_transposed, Scale, nn.Linear),
}  # fmt: skip


_ONLY_WITHIN = ("operator off by 4 ULP",)
"""Faults as small as the rounding of another device: named only if both runs have the same arithmetic."""
_IN_MODULES = ("operator off by 4 ULP", "bf16 accumulation", "transposed scale", "wrong eps")
"""Faults within modules, which compiled code and another division of the batch hide."""


def can_show(fault: str, pair: str) -> bool:
    """Return whether a fault exists in this kind of pair, and can be named there in principle."""
    kind, dtype = pair.split()
    if fault in ("skipped all_reduce", "wrong all_reduce"):
        return kind in ("1to2", "2to2")
    if fault == "BatchNorm's statistics lost" and kind in ("1to2", "2to2"):
        return False  # it is evaluated there, with the statistics that it began with
    if fault == "bf16 accumulation" and dtype == "bf16":
        return False
    if fault == "wrong eps" and dtype == "bf16" and kind in ("npu", "2to2"):
        return False  # it changes less than bf16 rounds; the module's settings show it
    if fault in _ONLY_WITHIN and kind == "npu":
        return False
    if kind == "compiled":
        return fault not in _IN_MODULES
    return kind != "1to2" or fault not in (*_IN_MODULES, "two batches swapped", "another dropout mask")


def drawn(number: int, seed: int, pairs: tuple[str, ...]) -> tuple[str, str, str, random.Random]:
    """Return the model, the pair and the fault of a case, and the generator that draws where."""
    draw = random.Random(f"{seed} {number}")
    while True:
        pair, fault, name = draw.choice(pairs), draw.choice(list(FAULTS)), draw.choice(list(MODELS))
        state = draw.getstate()
        if can_show(fault, pair) and FAULTS[fault](draw, MODELS[name].make()) is not None:
            draw.setstate(state)
            return name, pair, fault, draw

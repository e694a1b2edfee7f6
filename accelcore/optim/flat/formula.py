"""Formulas over flat memory: one call of the arithmetic for many parameters, alone or compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from accelcore.optim.flat.memory import Run
from accelcore.optim.formulas import FORMULAS
from accelcore.optim.formulas.formula import ClipFactor, FusibleFormula, Number, Numbers, State
from accelcore.util.text import is_number

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


class FlatFormula(FusibleFormula):
    """Mixin that calls a formula's arithmetic once for each run of flat memory. Put it before the formula's class.

    Args:
        params, arguments, options: for the formula's class.
        asynchronous: whether updates are counted on the device. The host then never waits, also if a step may be
            skipped, and a graph can be captured. Otherwise the host counts, and skips by not calling.
        compile: compiles the arithmetic, such as `torch.compile`; None leaves it as it is.
    """

    def __init__(
        self,
        params: Any,
        *arguments: Any,
        asynchronous: bool = False,
        compile: Compile | None = None,  # named as in torch
        **options: Any,
    ) -> None:
        super().__init__(params, *arguments, **options)
        self.counts_on_device = self._step_supports_amp_scaling = asynchronous
        self._compile = compile
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._parts: dict[Tensor, Any] = {}

    def place_runs(self, runs: Sequence[Run]) -> None:
        with torch.device("cpu"):  # also if the default device is another: these are many small operations
            self._parts = {run.value: self.parts_of(run) for run in runs}
        alike = tuple((run.shape, run.device, getattr(parts, "structure", None)) for run, parts in self._parts.items())
        self._compiled = _programs(self._compile, self.arithmetic, alike)

    def update_one(
        self, group: dict[str, Any], value: Tensor, gradient: Tensor, factor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        entry, numbers = self.entry(group, value), self.coefficients(group)
        if self._compile is not None:
            numbers = {name: _as_tensor(number) if is_number(number) else number for name, number in numbers.items()}
        numbers |= self._count(entry["step"], numbers, found_inf)
        parts = self._parts.get(value)
        state = {name: entry[name] for name in self.initial_state(group)}
        negative = bool(group.get("maximize"))
        advance = _advance
        if self._compile is not None:
            absent = tuple(name for name, number in numbers.items() if number is None)
            dtypes = (value.dtype, *(tensor.dtype for tensor in state.values()))
            flags = (negative, factor is None, found_inf is None)
            advance = self._program(_advance, (getattr(parts, "structure", None), absent, dtypes, flags))
        advance(self.arithmetic, numbers, parts, value, gradient, state, factor, found_inf, negative)

    def clip_factor(self, factor: ClipFactor, limit: float, gradients: Sequence[Tensor]) -> Tensor:
        if self._compile is not None and gradients:
            factor = self._program(factor, (limit, tuple(gradient.dtype for gradient in gradients)))
        return factor(limit, gradients)

    def _count(self, step: Tensor, numbers: Numbers, found_inf: Tensor | None) -> Numbers:
        """Count this update, if it is not skipped. Return the numbers that depend on the count."""
        if not self.counts_on_device:
            assert found_inf is None, "only the host skips if it counts"
            return self.gains(numbers, step.add_(1).item())
        if self._compile is None or self.gains is FusibleFormula.gains:  # to add 1 is one kernel anyway
            return _count(self.gains, numbers, step, found_inf)
        # Apart from `_advance`: in one kernel with it, each thread would compute powers in float64.
        absent = tuple(name for name, number in numbers.items() if number is None)
        gains: Numbers = self._program(_count, (absent, found_inf is None))(self.gains, numbers, step, found_inf)
        return gains

    def _program(self, function: Callable[..., Any], key: Any) -> Callable[..., Any]:
        """Return the compiled function for runs that differ in sizes and numbers only."""
        key = (function.__name__, key)
        if key not in self._compiled:
            assert self._compile is not None
            assert isinstance(function, FunctionType)
            # A copy of the code, because torch.compile counts compilations by code object, and gives up at 8.
            self._compiled[key] = self._compile(FunctionType(function.__code__.replace(), function.__globals__))
        return self._compiled[key]


def _as_tensor(number: float) -> Tensor:
    """Return a number as a tensor on the host, so that torch.compile does not bake it in.

    A new one each time: equal numbers as one tensor would be another program, and a fake tensor would be kept.
    """
    return torch.tensor(number, dtype=torch.float64, device="cpu")


def _count(
    gains: Callable[[Numbers, Number], Numbers], numbers: Numbers, step: Tensor, found_inf: Tensor | None
) -> Numbers:
    """Count an update on the device, and return what `gains` computes from the count."""
    step.add_(1 if found_inf is None else 1 - found_inf)
    return gains(numbers, step.double())


def _advance(
    arithmetic: Callable[..., None],
    numbers: Numbers,
    parts: Any,
    value: Tensor,
    gradient: Tensor,
    state: State,
    factor: Tensor | None,
    found_inf: Tensor | None,
    negative: bool,
) -> None:
    """Update a tensor and its state, in float32 at least."""
    exact = torch.promote_types(value.dtype, torch.float32)
    gradient = gradient.to(exact)
    if factor is not None:
        gradient = gradient * factor
    if negative:
        gradient = -gradient
    kept = {"value": value, **state}
    # Copies if the update may be skipped; a compiled kernel has none.
    found = {name: tensor.to(exact, copy=found_inf is not None) for name, tensor in kept.items()}
    arithmetic(numbers, found["value"], gradient, {name: found[name] for name in state}, parts)
    for name, tensor in kept.items():
        if found_inf is not None:
            found[name] = tensor.where(found_inf != 0, found[name])
        if found[name] is not tensor:
            tensor.copy_(found[name])


@lru_cache(maxsize=64)
def _programs(compile: Compile | None, arithmetic: Callable[..., None], alike: Any) -> dict[Any, Callable[..., Any]]:
    """Return the programs that all optimizers with this arithmetic share whose runs are alike."""
    return {}


FLAT_FORMULAS: dict[str, Callable[..., FlatFormula]] = {
    name: type(f"Flat{kind.__name__}", (FlatFormula, kind), {})
    for name, kind in FORMULAS.items()
    if issubclass(kind, FusibleFormula)
}
"""The formulas that can be computed over flat memory, by the registry's name."""

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
from accelcore.optim.formulas.formula import FusibleFormula, Number, Numbers, State

__all__ = ["FLAT_FORMULAS", "FlatFormula"]

Compile = Callable[[Callable[..., None]], Callable[..., None]]


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
        self._compiled: dict[Any, Callable[..., None]] = {}
        self._parts: dict[Tensor, Any] = {}
        self._tensors: dict[float, Tensor] = {}

    def place_runs(self, runs: Sequence[Run]) -> None:
        with torch.device("cpu"):  # also if the default device is another: these are many small operations
            self._parts = {run.value: self.parts_of(run) for run in runs}
        alike = tuple((run.shape, run.device, getattr(parts, "structure", None)) for run, parts in self._parts.items())
        self._compiled = _programs(self._compile, self.arithmetic, alike)

    def update_one(
        self, group: dict[str, Any], value: Tensor, gradient: Tensor, factor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        entry = self.entry(group, value)
        numbers = self.coefficients(group, self._count(entry, found_inf))
        parts = self._parts.get(value)
        state = {name: entry[name] for name in self.initial_state(group)}
        negative = bool(group.get("maximize"))
        advance = _advance
        if self._compile is not None:
            absent = tuple(name for name, number in numbers.items() if number is None)
            dtypes = (value.dtype, *(tensor.dtype for tensor in state.values()))
            flags = (negative, factor is None, found_inf is None)
            advance = self._program((getattr(parts, "structure", None), absent, dtypes, flags))
            numbers = {name: self._tensor(number) for name, number in numbers.items()}
        advance(self.arithmetic, numbers, parts, value, gradient, state, factor, found_inf, negative)

    def _count(self, entry: dict[str, Any], found_inf: Tensor | None) -> Number:
        """Count this update, if it is not skipped. Return the number of updates."""
        step: Tensor = entry["step"]
        if self.counts_on_device:
            step.add_(1 if found_inf is None else 1 - found_inf)
            return step.double()
        assert found_inf is None, "only the host skips if it counts"
        return step.add_(1).item()

    def _program(self, key: Any) -> Callable[..., None]:
        """Return the compiled arithmetic for runs that differ in sizes and numbers only."""
        if key not in self._compiled:
            assert self._compile is not None
            # A copy of the code, because torch.compile counts compilations by code object, and gives up at 8.
            self._compiled[key] = self._compile(FunctionType(_advance.__code__.replace(), globals()))
        return self._compiled[key]

    def _tensor(self, number: Any) -> Any:
        """Return a number as a tensor on the host, so that torch.compile does not bake it in."""
        if not isinstance(number, float | int) or isinstance(number, bool):
            return number
        if number not in self._tensors:
            if len(self._tensors) >= 100:  # a schedule sets another number in each step
                self._tensors.clear()
            self._tensors[number] = torch.tensor(number, dtype=torch.float64, device="cpu")
        return self._tensors[number]


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
def _programs(compile: Compile | None, arithmetic: Callable[..., None], alike: Any) -> dict[Any, Callable[..., None]]:
    """Return the programs that all optimizers with this arithmetic share whose runs are alike."""
    return {}


FLAT_FORMULAS: dict[str, Callable[..., FlatFormula]] = {
    name: type(f"Flat{kind.__name__}", (FlatFormula, kind), {})
    for name, kind in FORMULAS.items()
    if issubclass(kind, FusibleFormula)
}
"""The formulas that can be computed over flat memory, by the registry's name."""

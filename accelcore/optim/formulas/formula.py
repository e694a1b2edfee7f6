"""Formula: the base of the optimizers in this folder, for single tensors or over flat memory, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from accelcore.errors import TrainingError
from accelcore.optim.engine import Engine
from accelcore.optim.flat.memory import Run
from accelcore.util.text import is_number

STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Values of `state_dtype`. None: the parameter's dtype, and float32 for parameters of low precision."""

Number: TypeAlias = "float | Tensor"
Numbers = dict[str, Any]  # by name: numbers, switches, and None for a term that is left out
State = dict[str, Tensor]
ClipFactor = Callable[[float, Sequence[Tensor]], Tensor]
"""Function that returns the factor which clips the norm of all these gradients together."""
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


class Formula(Engine, torch.optim.Optimizer):
    """Optimizer that computes its formula as written: the reference of every route, and the fallback on every device.

    A subclass has the options, names the state, and computes the update of one tensor. A route with a kernel can
    subclass that, and replace `update`.

    State has torch's keys: `step`, a float32 scalar, if updates are counted; the rest in the shape and strides of the
    tensor. Arithmetic and state are float32 if a parameter has lower precision. Complex parameters are treated as
    pairs of real numbers, as in torch.

    Args:
        params: parameters or groups.
        state_dtype: `"float32"` or `"bfloat16"`, the dtype of the state whatever the parameter's; None: see above.
        arguments, options: for the constructor that comes next.

    Attributes:
        state_names: the names of a tensor's state, except `step`. Each starts at 0, or as `initial_state` says.
        by_element: whether it treats each element alike, so that a 1-D tensor may hold many parameters.
        by_group: whether it looks at the parameters of a group together, so that groups with equal options must not
            be merged.
        counts: whether the state counts the updates.
    """

    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    by_element = True
    by_group = False
    counts = True
    keeps_shapes = True

    def __init__(self, params: Any, *arguments: Any, state_dtype: str | None = None, **options: Any) -> None:
        super().__init__(params, *arguments, **options)
        if state_dtype is not None:
            self.defaults["state_dtype"] = state_dtype
            for group in self.param_groups:
                group.setdefault("state_dtype", state_dtype)
        for group in self.param_groups:
            not_negative(lr=group["lr"])  # torch checks the default only, and accepts nan in SGD
            name = group.get("state_dtype")
            if name not in (None, *STATE_DTYPES):
                raise ValueError(f"state_dtype={name!r} is unknown; available: {', '.join(STATE_DTYPES)}")
            if name is not None and any(value.is_complex() for value in group["params"]):
                raise ValueError(f"the state of a complex parameter is complex, and cannot be {name}")

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        """Return the names of the state of a tensor of this group, except `step`, and the value each starts with."""
        return dict.fromkeys(self.state_names, 0.0)

    def compute(self, group: dict[str, Any], value: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        """Update a tensor and its state in place; `state["step"]` counts this update. All are of one dtype."""
        raise NotImplementedError

    def factors(self, gradients: Sequence[Sequence[Tensor]]) -> Sequence[Tensor | None]:
        """Return for each group what its gradients are multiplied by first, or None."""
        return [None] * len(gradients)

    def clip_factor(self, factor: ClipFactor, limit: float, gradients: Sequence[Tensor]) -> Tensor:
        """Call a module's function that `factors` needs; a route may compile it."""
        return factor(limit, gradients)

    def state_dtype(self, group: dict[str, Any], value: Tensor) -> torch.dtype:
        name = group.get("state_dtype")
        return _exact(value.dtype) if name is None else STATE_DTYPES[name]

    def entry(self, group: dict[str, Any], value: Tensor) -> dict[str, Any]:
        """Return the state of a tensor. Create what is missing."""
        starts = self.initial_state(group)
        if not starts and not self.counts:
            return {}
        entry: dict[str, Any] = self.state[value]
        if self.counts and "step" not in entry:
            place = value.device if self.counts_on_device else torch.device("cpu")
            entry["step"] = torch.zeros((), dtype=torch.float32, device=place)
        for name, start in starts.items():
            if entry.get(name) is None:
                number = complex(start, start) if value.is_complex() else start
                entry[name] = torch.full_like(value, number, dtype=self.state_dtype(group, value))
        return entry

    def update(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        present = [[value for value in group["params"] if value.grad is not None] for group in self.param_groups]
        gradients = [[_dense(value.grad) for value in values] for values in present]
        unscale = None if grad_scale is None else 1 / grad_scale
        if unscale is not None and type(self).factors is not Formula.factors:  # these need norms of unscaled gradients
            gradients = [[gradient * unscale for gradient in group] for group in gradients]
            unscale = None
        factors = self.factors(gradients)
        for group, values, group_gradients, factor in zip(self.param_groups, present, gradients, factors, strict=True):
            for value, gradient in zip(values, group_gradients, strict=True):
                self.update_one(group, value, gradient, unscale if factor is None else factor, found_inf)

    def update_one(
        self, group: dict[str, Any], value: Tensor, gradient: Tensor, factor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Update one tensor and its state by its gradient times `factor`; `found_inf` is as for `update`."""
        assert found_inf is None, "only a kernel skips by itself"
        entry = self.entry(group, value)
        if self.counts:
            entry["step"] += 1
        exact = _exact(value.dtype)
        result, gradient = value.to(exact), gradient.to(exact)
        if factor is not None:
            gradient = gradient * factor.to(gradient.device)
        if group.get("maximize"):
            gradient = -gradient
        kept = {name: tensor for name, tensor in entry.items() if name != "step" and tensor is not None}
        exactly = {name: tensor.to(exact) for name, tensor in kept.items()}
        state = {name: _real(tensor) for name, tensor in exactly.items()}
        self.compute(group, _real(result), _real(gradient), state | {"step": entry.get("step")})
        # A tensor that was exact enough was not copied, and is updated already.
        if result is not value:
            value.copy_(result)
        for name, tensor in kept.items():
            if exactly[name] is not tensor:
                tensor.copy_(exactly[name])


class FusibleFormula(Formula):
    """Formula whose `arithmetic` serves one parameter as well as a run of flat memory, alone or compiled.

    A compiler gets its numbers as tensors without dimensions, so that another learning rate needs no other program.
    Therefore `arithmetic` only multiplies by numbers or adds them. What depends on several numbers is computed in
    `coefficients`, on the host and in float64. What depends on the count of updates is computed in `gains`, in float64
    and where the updates are counted.
    """

    def coefficients(self, group: dict[str, Any]) -> Numbers:
        """Return the numbers of the arithmetic for tensors of this group that are the same in each update."""
        raise NotImplementedError

    @staticmethod
    def gains(n: Numbers, step: Number) -> Numbers:
        """Return the other numbers of update number `step`; `n` are the `coefficients`."""
        return {}

    @staticmethod
    def arithmetic(n: Numbers, value: Tensor, gradient: Tensor, state: State, parts: Any) -> None:
        """Update a tensor and its state in place. Gaps between the parameters of a run must stay zero.

        Args:
            n: what `coefficients` and `gains` returned.
            value, gradient, state: of one parameter, or of a run of flat memory.
            parts: computes norms of each parameter or of its channels: what `parts_of` returned.
        """
        raise NotImplementedError

    @staticmethod
    def parts_of(run: Run | Tensor) -> Any:
        """Return what `arithmetic` needs to tell parameters apart; None if it treats each element alike."""
        return None

    def compute(self, group: dict[str, Any], value: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        numbers = self.coefficients(group)
        numbers |= self.gains(numbers, state["step"].item())
        self.arithmetic(numbers, value, gradient, state, self.parts_of(value))


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


def options(group: dict[str, Any], *names: str) -> Numbers:
    """Return options by these names; None for a weight decay or momentum of 0, which is left out of the arithmetic."""
    absent = ("weight_decay", "momentum")
    return {name: None if name in absent and not group[name] else group[name] for name in names}


def given(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the options among the `locals()` of a constructor: its arguments after `params`, up to `state_dtype`."""
    others = ("self", "params", "state_dtype", "__class__")
    return {name: value for name, value in arguments.items() if name not in others}


def decay(name: str, value: float) -> Numbers:
    """Return the two numbers of a moving average."""
    return {name: value, f"1 - {name}": 1 - value}


def moving_average(mean: Tensor, n: Numbers, name: str, new: Tensor) -> Tensor:
    """Update an average in place by the numbers of `decay(name, ...)`, and return it."""
    return mean.mul_(n[name]).add_(new * n[f"1 - {name}"])


def moments(n: Numbers, gradient: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Update both moments by the decays "beta1" and "beta2", and return them."""
    mean = moving_average(state["exp_avg"], n, "beta1", gradient)
    return mean, moving_average(state["exp_avg_sq"], n, "beta2", gradient * gradient)


def plus_decay(n: Numbers, value: Tensor, tensor: Tensor) -> Tensor:
    """Return a gradient or update plus the weight decay, rounded once if the number is not a tensor."""
    share = n["weight_decay"]
    if share is None:
        return tensor
    return tensor + value * share if isinstance(share, Tensor) else tensor.add(value, alpha=share)


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm of all elements, in float32 or more exact, on the first one's device; 0 of none."""
    norms = [torch.linalg.vector_norm(t, dtype=_exact(t.dtype)) for t in tensors]
    if not norms:
        return torch.zeros((), device="cpu")
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total


def not_negative(**values: float) -> None:
    """Raise ValueError for a value below 0, or one that is not a number."""
    for name, value in values.items():
        if not value >= 0:  # true of nan, too
            raise ValueError(f"{name}={value} is out of range: it must be 0 or more")


def fractions(**values: float) -> None:
    """Raise ValueError for a value that is not at least 0 and below 1."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} is out of range: it must be at least 0 and below 1")


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _dense(gradient: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        raise TrainingError(
            "a gradient is sparse, and the formula needs dense ones",
            remedy="make the embedding with sparse=False, or choose an optimizer that supports sparse gradients",
        )
    return gradient


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor

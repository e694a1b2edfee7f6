"""Formula: the base of the optimizers in this folder, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from accelcore.errors import TrainingError
from accelcore.optim.engine import Engine
from accelcore.optim.flat.memory import Run

STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Values of `state_dtype`. None: the parameter's dtype, and float32 for parameters of low precision."""

Number: TypeAlias = "float | Tensor"
Numbers = dict[str, Any]  # by name: numbers, switches, and None for a term that is left out
State = dict[str, Tensor]
ClipFactor = Callable[[float, Sequence[Tensor]], Tensor]
"""Function that returns the factor which clips the norm of all these gradients together."""


class Formula(Engine, torch.optim.Optimizer):
    """An optimizer as its formula says: the reference of every route, and the fallback on every device.

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
        return torch.zeros(())
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

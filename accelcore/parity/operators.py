"""The operators of a step: what each returned, and whether it is right for its own inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accelcore.errors import ConfigurationError
from accelcore.torch_internals import (
    OpOverload,
    backward_number,
    end_dispatch_mode,
    forward_number,
    operator_name,
    pytree,
)
from accelcore.util.containers import tensors

_RANDOM = torch.Tag.nondeterministic_seeded
_SUMS = (
    "mm", "addmm", "bmm", "baddbmm", "matmul", "convolution", "sum", "mean", "linear", "dot", "mv", "addmv",
)  # fmt: skip
"""Operators whose rounding grows with the number of terms that they add up."""
_COPIES = (
    "empty", "new_", "detach", "_to_copy", "clone", "copy_", "zeros", "ones", "full", "arange", "fill_", "zero_",
    "scalar_tensor",
)  # fmt: skip
"""How the names of operators begin that compute nothing."""
_ASYNCHRONOUS = ("c10d", "_c10d_functional")
"""Namespaces of collectives, whose results arrive later. The events of reduced gradients cover them."""
_LARGEST = 1 << 26  # elements: a larger operator is not computed on the host
_LARGEST_ERROR_POINTWISE, _LARGEST_ERROR = 3.5, 16.0
"""Errors in units of rounding that a right kernel stays below. They name a suspect, and raise no alarm themselves."""
_CERTAIN, _CERTAIN_SHORT = 64.0, 16.0
"""Errors that are an alarm: of operators on single elements and of sums, whose terms are known; in 16 bits the second.

Other operators, such as the backward pass of a convolution, may cancel all but rounding.
"""


class Operators(TorchDispatchMode):
    """Mode of torch's dispatcher that reports each operator of a step, with the module that it belongs to.

    Args:
        report: receives the operator's name, the module, whether it is of the backward pass, and the results.
        checks: whether each operator is also computed in float64 on the host. This waits for the device, so it is for
            the few steps that are looked at.

    Attributes:
        pause: a context in which operators are not reported.
        checked: a dict for each operator that was computed on the host. `ratio` is its largest error in units of the
            expected rounding. `is_wrong`: a right kernel has a smaller one. `is_certain`: nothing else explains it.
    """

    def __init__(self, report: Callable[[str, str, bool, list[Tensor]], None], *, checks: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.checked: list[dict[str, Any]] = []
        self._report, self._checks, self.pause = report, checks, _Pause()
        self._step: int | None = None  # whose operators are reported now
        self._modules: list[tuple[str, int]] = []
        self._spans: list[tuple[int, int, str]] = []  # first and last number of a module's autograd nodes

    def start(self, step: int) -> None:
        """Begin to report the operators of a step."""
        if self._step is None:
            self._step, self._modules, self._spans = step, [], []
            self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self, *, quietly: bool = False) -> None:
        """Report no more; unless `quietly`, raise if another mode of the dispatcher began or ended within the step."""
        step, self._step = self._step, None
        if step is not None and not end_dispatch_mode(self) and not quietly:
            raise ConfigurationError(
                f"a mode of torch's dispatcher began or ended within step {step}, whose operators are recorded",
                why="operators are recorded by a mode, too. It lasts from the first forward pass of the step to its "
                "update, and modes must end in the reverse order",
                remedy="open your mode around the whole step, with its update, or remove operators=",
            )

    def enter(self, module: str) -> None:
        """Note that a module is called."""
        if self._step is not None:
            self._modules.append((module, forward_number()))

    def leave(self, module: str) -> None:
        """Note that a module has returned."""
        while self._modules:
            name, first = self._modules.pop()
            self._spans.append((first, forward_number(), name))
            if name == module:
                break

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (self.pause.depth or func.is_view or func.namespace in _ASYNCHRONOUS or _name(func).startswith(_COPIES)):
            self._saw(func, (args, kwargs or {}), result)
        return result

    def _saw(self, operator: OpOverload, given: Any, result: Any) -> None:
        node = backward_number()
        if node is None:
            module = self._modules[-1][0] if self._modules else ""
        else:
            module = next((name for first, last, name in self._spans if first <= node < last), "")
        name = operator_name(operator)
        # Bytes are a vendor's workspace, of which not all is written.
        results = [each for each in tensors(result) if each.dtype != torch.uint8]
        self._report(name, module, node is not None, results)
        ratio = _error_of(operator, given, result) if self._checks else None
        if ratio is not None:
            pointwise, short = _is_pointwise(operator), any(each.element_size() == 2 for each in results)
            known = pointwise or _name(operator) in _SUMS
            self.checked.append({
                "step": self._step, "operator": name, "module": module, "backward": node is not None, "ratio": ratio,
                "is_wrong": ratio > (_LARGEST_ERROR_POINTWISE if pointwise else _LARGEST_ERROR),
                "is_certain": known and ratio > (_CERTAIN_SHORT if short else _CERTAIN),
            })  # fmt: skip


class _Pause:
    """Context that can be entered again; `depth` says how often it was."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *of_error: object) -> None:
        self.depth -= 1


def _name(operator: OpOverload) -> str:
    return operator_name(operator).removeprefix("aten::").split(".")[0]


def _error_of(operator: OpOverload, given: Any, result: Any) -> float | None:
    """Return the largest error of an operator's results, in units of rounding; None if the host cannot compute it."""
    if _RANDOM in operator.tags or operator._schema.is_mutable or operator.namespace != "aten":
        return None
    results = [each for each in tensors(result) if each.is_floating_point()]
    if not results or any(each.numel() > _LARGEST for each in tensors(list(given[0]))):
        return None
    try:
        exact = [each for each in tensors(_on_host(operator, given)) if each.is_floating_point()]
        # The sum of the absolute values of all terms bounds the rounding of a sum.
        sums = _on_host(operator, given, torch.abs) if _name(operator) in _SUMS else None
    except (RuntimeError, TypeError, NotImplementedError, ValueError):
        return None  # the host has no such kernel, as for a vendor's fused operator
    worst = 0.0
    for ours, true in zip(results, exact, strict=False):
        if ours.shape != true.shape or not ours.numel():
            continue
        unit = torch.finfo(ours.dtype).eps
        size = sums if isinstance(sums, Tensor) and sums.shape == true.shape else true.abs()
        floor = true.square().mean().sqrt() if _is_pointwise(operator) else true.abs().max()
        allowed = unit * torch.maximum(size, floor).clamp_min(torch.finfo(ours.dtype).tiny)
        given_back = ours.detach().cpu()
        right = (given_back == true.to(ours.dtype)) | true.isnan()  # infinite where float64 is too large for the dtype
        error = (given_back.double() - true).abs() / allowed
        worst = max(worst, torch.where(right, 0.0, error).nan_to_num(nan=torch.inf).max().item())
    return worst


def _on_host(operator: OpOverload, given: Any, change: Callable[[Tensor], Tensor] = lambda value: value) -> Any:
    """Compute an operator on the host in float64, with changed numbers."""

    def host(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            return change(value.double()) if value.is_floating_point() else value
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    arguments, options = pytree.tree_map(host, given)
    return operator(*arguments, **options)


def _is_pointwise(operator: OpOverload) -> bool:
    return torch.Tag.pointwise in operator.tags

"""The operators of a step: what each returned, and whether it is right for its own inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accelcore.errors import ConfigurationError
from accelcore.torch_internals import OpOverload, backward_number, end_dispatch_mode, operator_name, pytree
from accelcore.util.containers import tensors

__all__ = ["Checked", "Operators"]

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


@dataclass(frozen=True)
class Checked:
    """An operator beside the host's float64 result for the same inputs.

    Attributes:
        ratio: the largest error in units of the expected rounding.
        is_wrong: whether the error is larger than a right kernel's.
        is_certain: whether it is so large, and the operator such, that nothing else explains it.
    """

    step: int
    operator: str
    module: str
    backward: bool
    ratio: float
    is_wrong: bool
    is_certain: bool


class Operators:
    """Mode of torch's dispatcher that reports each operator of a step, with the module that it belongs to.

    Args:
        report: receives the operator's name, the module, whether it is of the backward pass, and the results.
        checks: whether each operator is also computed in float64 on the host; `checked` lists the outcomes. This
            waits for the device, so it is for the few steps that are looked at.
    """

    def __init__(self, report: Callable[[str, str, bool, Any], None], *, checks: bool) -> None:
        self.checked: list[Checked] = []
        self._report, self._checks = report, checks
        self._mode: _Mode | None = None
        self._modules: list[tuple[str, int]] = []
        self._spans: list[tuple[int, int, str]] = []  # first and last number of a module's autograd nodes
        self._pauses = 0

    def start(self, step: int) -> None:
        """Begin to report the operators of a step."""
        if self._mode is None:
            self._step = step
            self._modules.clear()
            self._spans.clear()
            self._mode = _Mode(self._saw)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self, *, quietly: bool = False) -> None:
        """Report no more.

        Raises:
            ConfigurationError: another mode of torch's dispatcher began or ended within the step, unless `quietly`.
        """
        mode, self._mode = self._mode, None
        if mode is not None and not end_dispatch_mode(mode) and not quietly:
            raise ConfigurationError(
                f"a mode of torch's dispatcher began or ended within step {self._step}, whose operators are recorded",
                why="recording operators is a mode, too, from the first forward pass of the step to its update, and "
                "modes must end in the reverse order",
                remedy="open your mode around the whole step, with its update, or leave operators= out",
            )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not report what runs in this context."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def enter(self, module: str, number: int) -> None:
        """A module is called; `number` is that of the next node of autograd."""
        if self._mode is not None:
            self._modules.append((module, number))

    def leave(self, module: str, number: int) -> None:
        """A module has returned."""
        while self._modules:
            name, first = self._modules.pop()
            self._spans.append((first, number, name))
            if name == module:
                break

    def _saw(self, operator: OpOverload, arguments: Any, options: Any, result: Any) -> None:
        if self._pauses or operator.is_view or operator.namespace in _ASYNCHRONOUS or not _computes(operator):
            return
        node = backward_number()
        if node is None:
            module = self._modules[-1][0] if self._modules else ""
        else:
            module = next((name for first, last, name in self._spans if first <= node < last), "")
        name = operator_name(operator)
        # Bytes are a vendor's workspace, of which not all is written.
        results = [each for each in tensors(result) if each.dtype != torch.uint8]
        with self.paused():
            self._report(name, module, node is not None, results)
            if self._checks:
                ratio = _error_of(operator, (arguments, options), result)
                if ratio is not None:
                    pointwise = _is_pointwise(operator)
                    is_wrong = ratio > (_LARGEST_ERROR_POINTWISE if pointwise else _LARGEST_ERROR)
                    short = any(each.element_size() == 2 for each in results)
                    is_certain = ratio > (_CERTAIN_SHORT if short else _CERTAIN)
                    is_certain = is_certain and (pointwise or _name(operator) in _SUMS)
                    place = (self._step, name, module, node is not None)
                    self.checked.append(Checked(*place, ratio, is_wrong, is_certain))


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, saw: Callable[..., None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._saw = saw

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._saw(func, args, kwargs, result)
        return result


def _computes(operator: OpOverload) -> bool:
    """Return whether an operator computes floating-point numbers from others: it neither draws nor copies."""
    return not _name(operator).startswith(_COPIES)


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
        exact = [each for each in tensors(_on_host(operator, given, torch.float64)) if each.is_floating_point()]
        sums = _sums_of(operator, given)
    except (RuntimeError, TypeError, NotImplementedError, ValueError):
        return None  # the host has no such kernel, as for a vendor's fused operator
    worst = 0.0
    for ours, true in zip(results, exact, strict=False):
        if ours.shape != true.shape or not ours.numel():
            continue
        unit = torch.finfo(ours.dtype).eps
        size = true.abs() if sums is None or sums.shape != true.shape else sums
        floor = true.square().mean().sqrt() if _is_pointwise(operator) else true.abs().max()
        allowed = unit * torch.maximum(size, floor).clamp_min(torch.finfo(ours.dtype).tiny)
        error = ((ours.detach().cpu().double() - true).abs() / allowed).nan_to_num(0.0).max().item()
        worst = max(worst, error)
    return worst


def _on_host(operator: OpOverload, given: Any, dtype: torch.dtype) -> Any:
    def host(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            return value.to(dtype) if value.is_floating_point() else value
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return dtype
        return value

    arguments, options = pytree.tree_map(host, given)
    return operator(*arguments, **options)


def _sums_of(operator: OpOverload, given: Any) -> Tensor | None:
    """Return the sums of the absolute values of all terms, which bound an operator's rounding; None if it adds none."""
    if _name(operator) not in _SUMS:
        return None
    absolute = pytree.tree_map(
        lambda value: value.abs() if isinstance(value, Tensor) and value.is_floating_point() else value, given
    )
    found: Tensor = _on_host(operator, absolute, torch.float64)
    return found if isinstance(found, Tensor) else None


def _is_pointwise(operator: OpOverload) -> bool:
    return torch.Tag.pointwise in operator.tags

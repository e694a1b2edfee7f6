"""What a kernel of O1 does to the inputs of an operator, for each of the table's treatments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from accelcore.errors import TrainingError
from accelcore.precision.region import in_low_precision
from accelcore.precision.table import LOW_PRECISION, Treatment

__all__ = ["Compute", "computation", "floats", "widest", "with_casts"]

Compute = Callable[..., Any]

# They convert as they go, told a dtype: there is no copy of their input in fp32.
_CONVERTING = ("cumprod", "cumsum", "linalg_vector_norm", "log_softmax", "nansum", "prod", "softmax", "sum")


def computation(operator: OpOverload, treatment: Treatment, device_type: str) -> Compute:
    """The operator under a treatment, to be called with autocast switched off, for tensors of a kind of device.

    Casts are recorded by autograd: a gradient has the dtype of the tensor that it belongs to.
    """
    makers: dict[Treatment, Callable[[OpOverload, str], Compute]] = {
        Treatment.LOW: _low,
        Treatment.FP32: _fp32,
        Treatment.WIDEST: _widest,
        Treatment.AS_IS: lambda operator, device_type: operator,
        Treatment.REFUSED: _refused,
    }
    return makers[treatment](operator, device_type)


def floats(values: Iterable[Any], device_type: str | None = None) -> Iterator[Tensor]:
    """The tensors among arguments, and in lists of them, that autocast may cast: of fp32, bf16 or fp16.

    None stands for any kind of device.
    """
    for value in values:
        if isinstance(value, Tensor):
            if _may_be_cast(value, device_type or value.device.type):
                yield value
        elif isinstance(value, list | tuple):
            yield from floats(value, device_type)


def widest(tensors: Iterable[Tensor]) -> torch.dtype:
    """The narrowest dtype that holds them all: bf16 and fp16 together take fp32."""
    return reduce(torch.promote_types, {tensor.dtype for tensor in tensors}, torch.bool)


def with_casts(
    function: Compute, arguments: Iterable[Any], options: dict[str, Any], device_type: str, to: Callable[[Tensor], Any]
) -> Any:
    """Call a function with `to(tensor)` in place of each tensor among its arguments that autocast may cast."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return to(value) if _may_be_cast(value, device_type) else value
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            return [cast(item) for item in value] if isinstance(value, list) else tuple(cast(item) for item in value)
        return value

    return function(*map(cast, arguments), **{name: cast(value) for name, value in options.items()})


def _may_be_cast(tensor: Tensor, device_type: str) -> bool:
    return tensor.dtype in (torch.float32, *LOW_PRECISION) and tensor.device.type == device_type


def _low(operator: OpOverload, device_type: str) -> Compute:
    def compute(*arguments: Any, **options: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        return with_casts(operator, arguments, options, device_type, partial(in_low_precision, dtype=dtype))

    return compute


def _fp32(operator: OpOverload, device_type: str) -> Compute:
    if operator._opname not in _CONVERTING:
        return lambda *arguments, **options: with_casts(operator, arguments, options, device_type, Tensor.float)
    position = [argument.name for argument in operator._schema.arguments].index("dtype")

    def compute(*arguments: Any, **options: Any) -> Any:
        # What the caller says of the dtype comes first.
        told = options.get("dtype") is not None or len(arguments) > position
        if not told and any(tensor.dtype in LOW_PRECISION for tensor in floats(arguments, device_type)):
            options["dtype"] = torch.float32
        return operator(*arguments, **options)

    return compute


def _widest(operator: OpOverload, device_type: str) -> Compute:
    def compute(*arguments: Any, **options: Any) -> Any:
        dtype = widest(floats((*arguments, *options.values()), device_type))
        return with_casts(operator, arguments, options, device_type, partial(Tensor.to, dtype=dtype))

    return compute


def _refused(operator: OpOverload, device_type: str) -> Compute:
    def compute(*arguments: Any, **options: Any) -> Any:
        low = {tensor.dtype for tensor in floats((*arguments, *options.values()), device_type)} & set(LOW_PRECISION)
        if low:
            raise TrainingError(
                f"{operator._opname} was given {', '.join(sorted(map(str, low)))}, which autocast refuses",
                why="its gradient grows as 1 / p, out of the range of low precision",
                available="binary_cross_entropy_with_logits, or BCEWithLogitsLoss, which is exact",
                remedy="leave the sigmoid out and give that one the logits; or compute the probabilities in fp32",
            )
        return operator(*arguments, **options)

    return compute

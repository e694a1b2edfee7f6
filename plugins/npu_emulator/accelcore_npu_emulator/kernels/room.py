"""Check that a device has room for a result before the host computes it."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcore_npu_emulator.kernels.host_memory import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from accelcore_npu_emulator.kernels.signature import Signature

_HOST_HAS_NONE = re.compile(r"DefaultCPUAllocator: .* allocate (\d+) bytes")
_META = torch.device("meta")
_ELEMENT = 8  # bytes, where no argument says how many


def room_finder(
    operator: torch._ops.OpOverload, signature: Signature, memory: int
) -> Callable[[list[Any], dict[str, Any], torch.device], None]:
    """Return a function of host arguments and a device that raises OutOfMemoryError if the results do not fit.

    The function allocates the memory of the results on the device and frees it. It does so only for results that may
    exceed the whole device, which has `memory` bytes: finding shapes takes longer than computing a small result.
    """
    pointwise = torch.Tag.pointwise in operator.tags

    def find(values: list[Any], keywords: dict[str, Any], device: torch.device) -> None:
        arguments = [*values, *(value for name, value in keywords.items() if name not in signature.outs)]
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        elements = _broadcast(tensors) if pointwise else _most_elements(tensors, arguments)
        if elements * max((tensor.element_size() for tensor in tensors), default=_ELEMENT) <= memory:
            return
        described, options = _described(values), {name: _described(value) for name, value in keywords.items()}
        if signature.has_device:
            signature.replace("device", _META, described, options)
        if signature.has_generator:
            signature.replace("generator", None, described, options)
        try:
            results = operator(*described, **options)
        except Exception:  # noqa: BLE001  the shape depends on values, or the arguments are wrong: the host finds out
            return
        for result in tensors_in(results):
            torch.empty(result.shape, dtype=result.dtype, device=device)

    return find


def tell_device_out_of_memory(error: RuntimeError, device: torch.device) -> None:
    """Raise OutOfMemoryError if the host ran out of memory for a result that does not fit on the device, either."""
    if (found := _HOST_HAS_NONE.search(str(error))) is not None:
        torch.empty(int(found[1]), dtype=torch.uint8, device=device)


def _broadcast(tensors: Iterable[Tensor]) -> int:
    sizes: list[int] = []
    for tensor in tensors:
        shape = tensor.shape[::-1]
        sizes = [max(pair) for pair in zip(sizes, shape, strict=False)] + [*sizes[len(shape) :], *shape[len(sizes) :]]
    return prod(sizes)


def _most_elements(tensors: list[Tensor], arguments: list[Any]) -> float:
    """Return an upper bound of the results' elements for operators in practice."""
    numbers = [abs(number) for number in _numbers(arguments)]
    if not tensors and not any(True for argument in arguments for _ in tensors_in(argument)):
        # Up to a square, as of `eye`; a range has more elements the smaller its step is.
        return prod(max(1.0, number, 1 / number if number else 1.0) for number in numbers) ** 2
    # Each row with each row or column, as in products, look-ups and distances.
    longest: int = max((size for tensor in tensors for size in tensor.shape), default=1)
    largest = max((tensor.numel() for tensor in tensors), default=0) * longest
    listed = sum(t.numel() for argument in arguments if not isinstance(argument, Tensor) for t in tensors_in(argument))
    return (largest + listed) * prod(1.0 + number for number in numbers)


def _numbers(argument: Any) -> Iterator[float]:
    if isinstance(argument, (int, float)):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from _numbers(item)


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    if isinstance(value, (list, tuple)):
        return [_described(item) for item in value]
    return value

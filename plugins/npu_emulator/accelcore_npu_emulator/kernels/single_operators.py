"""Single operators that torch_npu's C++ calls through CANN's legacy interface instead of torch's dispatcher."""

from __future__ import annotations

import ctypes
import json
import math
import traceback
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from accelcore_npu_emulator.kernels.host_memory import CPU

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelcore_npu_emulator.kernels.machine import Machine

_DONE, _UNKNOWN, _FAILED = range(3)
# The numbers of aclDataType.
_DTYPES = {
    0: torch.float32, 1: torch.float16, 2: torch.int8, 3: torch.int32, 4: torch.uint8, 6: torch.int16, 9: torch.int64,
    11: torch.float64, 12: torch.bool, 16: torch.complex64, 17: torch.complex128, 27: torch.bfloat16,
}  # fmt: skip


def single_operator_handler(machine: Machine) -> Callable[[bytes, bytes, bytes], int]:
    """Return the native half's handler: (operator, inputs, outputs), the last two in JSON."""

    def handle(operator: bytes, inputs: bytes, outputs: bytes) -> int:
        name = operator.decode()
        if name != "Identity" and name not in _OPERATORS:
            return _UNKNOWN
        try:
            with torch.no_grad(), torch.inference_mode(False):
                machine.recorder.run(_prepared(name, json.loads(inputs), json.loads(outputs)))
        except Exception:  # noqa: BLE001  the caller is C code: it gets a status, the reader the traceback
            traceback.print_exc()
            return _FAILED
        return _DONE

    return handle


def _prepared(name: str, inputs: list[Any], outputs: list[Any]) -> Callable[[], object]:
    if name == "Identity":  # copies the bytes, whatever the shapes say
        (_, _, source, available, _), (_, _, target, room, _) = inputs[0], outputs[0]
        return lambda: ctypes.memmove(target, source, min(available, room))
    given, target = [_tensor(described) for described in inputs], _tensor(outputs[0])
    assert target is not None, "each of these operators has a result"
    return lambda: target.copy_(_OPERATORS[name](given))


def _tensor(described: list[Any]) -> Tensor | None:
    """Return a host tensor for [type, dimensions, address, bytes, on the host]; None if it is absent.

    A tensor on the host, such as the sides of a padding, is copied: it is freed after the call, and a replay needs it.
    """
    dtype, dimensions, address, size, on_host = described
    if dtype not in _DTYPES or not address or not size:
        return None
    storage = torch._C._construct_storage_from_data_pointer(address, CPU, size)
    flat = torch.empty(0, dtype=_DTYPES[dtype], device=CPU).set_(storage)
    count = math.prod(dimensions)
    tensor = flat[:count].reshape(dimensions) if count <= flat.numel() else flat
    return tensor.clone() if on_host else tensor


def _pad(inputs: list[Any]) -> Tensor:
    sides = [side for pair in reversed(inputs[1].reshape(-1, 2).tolist()) for side in pair]
    value = inputs[2].item() if len(inputs) > 2 and inputs[2] is not None else 0
    return functional.pad(inputs[0], sides, value=value)


_OPERATORS: dict[str, Callable[[list[Any]], Tensor]] = {
    "Fill": lambda inputs: inputs[1].expand(inputs[0].tolist()),
    "PadV3": _pad,
}

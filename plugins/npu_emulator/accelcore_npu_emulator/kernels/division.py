"""Division with a rounding mode, and in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcore.torch_features import GET_KERNEL
from accelcore_npu_emulator.kernels.boxing import host_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelcore_npu_emulator.kernels.machine import Machine

_MODES = (None, "floor", "trunc")


def _divide_in_place(self: Tensor, other: Tensor | float, *, rounding_mode: str | None = None) -> Tensor:
    # The device divides integers in place and truncates; torch refuses this on the host.
    return self.copy_(torch.div(self, other, rounding_mode=rounding_mode))


OPERATORS: dict[str, Callable[..., Any]] = {"div_": _divide_in_place}


def division_kernels(machine: Machine) -> dict[str, Callable[..., Any]]:
    """Return the kernels with a rounding mode, by operator name. Call it before torch_npu's are replaced."""
    aten = torch.ops.aten
    return {
        "aten::div.Tensor_mode": _with_mode(aten.div.Tensor_mode, machine),
        "aten::div.out_mode": _with_mode(aten.div.out_mode, machine),
        "aten::div_.Tensor_mode": _with_mode(aten.div_.Tensor_mode, machine, _divide_in_place),
    }


def _with_mode(
    operator: torch._ops.OpOverload, machine: Machine, function: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    host = host_kernel(operator, machine, function)
    # torch_npu's own kernel refuses an unknown mode, with its own message and code. An old torch cannot return it: the
    # host refuses then.
    own = torch.library.get_kernel(operator, "PrivateUse1") if GET_KERNEL.present else None
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

    def kernel(*args: Any, rounding_mode: str | None, **kwargs: Any) -> Any:
        if rounding_mode in _MODES or own is None:
            return host(*args, rounding_mode=rounding_mode, **kwargs)
        # torch passes the number in `tensor.div_(2)` as a number.
        tensors = [value if isinstance(value, Tensor) else torch.tensor(value) for value in args]
        return own.call_boxed(keys, *tensors, rounding_mode=rounding_mode, **kwargs)

    return kernel

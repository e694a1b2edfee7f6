"""Operators that torch_npu has no kernel for: it computes them on the host, or they are refused.

torch_npu has no setting for this: it copies the arguments to the host and the results back, and warns of each operator
once. `ACCEL_NPU_FALLBACK=raise` makes it an error. What an operator's own kernel does on the host is not seen.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.util.text import shown

__all__ = ["VARIABLE", "apply_setting"]

VARIABLE = "ACCEL_NPU_FALLBACK"
"""`allow`, as torch_npu does by itself, or `raise`."""

_SETTINGS = ("allow", "raise")
# Any of these serves tensors of the device.
_KEYS = (
    "PrivateUse1",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)


def apply_setting() -> None:
    """Do what the environment variable says, for the rest of the process.

    Raises:
        ConfigurationError: the variable has another value.
    """
    setting = os.environ.get(VARIABLE) or "allow"
    if setting not in _SETTINGS:
        raise ConfigurationError(
            f"{VARIABLE}={shown(setting)} is not one of its settings",
            available=", ".join(_SETTINGS),
            remedy="correct or unset it",
        )
    if setting == "raise":
        _refuse_all()


@cache
def _refuse_all() -> object:
    """Give each operator without a kernel one that raises; they stay for as long as the library, which is kept."""
    torch.npu.init()  # type: ignore[attr-defined]  # before which not all kernels need be there
    make: Callable[[str, str], Any] = torch.library.Library
    library = make("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of kernels from Python
        for name in _without_kernel():
            library.impl(name.removeprefix("aten::"), _refusal(name), "PrivateUse1")
    return library


def _without_kernel() -> Iterator[str]:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and not any(has_kernel(name, key) for key in _KEYS):
            yield name


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"the operator {name} has no kernel for the NPU",
            why=f"torch_npu would compute it on the host, which {VARIABLE}=raise refuses",
            remedy=f"use another operator, or set {VARIABLE}=allow",
        )

    return refuse

"""Fallback of operators without an NPU kernel: computed on the host, or refused.

torch_npu copies the arguments to the host and the results back, and warns once for each operator. It has no setting
for this. `ACCEL_NPU_FALLBACK=raise` makes it an error. Host work inside an operator's own kernel is not detected.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NoReturn

import torch

from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.util.text import shown

VARIABLE = "ACCEL_NPU_FALLBACK"  # `allow`, torch_npu's default, or `raise`

_SETTINGS = ("allow", "raise")
# An operator with a kernel under one of these keys runs on the device.
_KEYS = (
    "PrivateUse1",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)


def has_kernel(name: str) -> bool:
    """Return whether an operator runs on the NPU, not on the host."""
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in _KEYS)


def apply_setting() -> None:
    """Apply ACCEL_NPU_FALLBACK for the rest of the process."""
    setting = os.environ.get(VARIABLE) or "allow"
    if setting not in _SETTINGS:
        raise ConfigurationError(
            f"{VARIABLE}={shown(setting)} is not a valid setting",
            available=", ".join(_SETTINGS),
            remedy="correct or unset it",
        )
    if setting == "raise":
        _refuse_all()


@cache
def _refuse_all() -> object:
    """Register a kernel that raises for each operator without one. The cache keeps the library, and so the kernels."""
    torch.npu.init()  # type: ignore[attr-defined]  # some kernels are registered only now
    make: Callable[[str, str], Any] = torch.library.Library
    library = make("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of kernels from Python
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith("aten::") and not has_kernel(name):
                library.impl(name.removeprefix("aten::"), partial(_refuse, name), "PrivateUse1")
    return library


def _refuse(name: str, *arguments: Any, **options: Any) -> NoReturn:
    raise UnsupportedError(
        f"the operator {name} has no kernel for the NPU",
        why=f"torch_npu would compute it on the host, which {VARIABLE}=raise refuses",
        remedy=f"use another operator, or set {VARIABLE}=allow",
    )

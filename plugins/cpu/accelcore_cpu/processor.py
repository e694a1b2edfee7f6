"""Table of the processor's instructions for products. Every run and every rank decides alike by it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from accelcore.torch_features import GET_CAPABILITIES

USUAL, ONEDNN = "highest", "medium"
"""torch's settings for fp32 products: by its usual library, and by oneDNN. torch means the latter for bf16, but oneDNN
multiplies in bf16 only on processors with matrix units for it, and in fp32 on others."""

_UNITS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),  # the last is ARM's
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
_CPUINFO = Path("/proc/cpuinfo")
_TORCH_NAMES = {"avx512f": "avx512_f", "asimdhp": "fp16_arith"}
_set = torch._C._set_float32_matmul_precision


def has_units(dtype: torch.dtype) -> bool:
    """Return whether this processor has instructions for products in `dtype`."""
    return _has(*_UNITS[dtype])


def lacks_onednn(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has no kernels for `dtype` on this processor: torch refuses LSTMs in it, for example."""
    return not has_units(dtype) and (dtype is torch.float16 or not _has("avx512_f"))


def fast_format() -> str:
    """Return the format in which products are computed under `ONEDNN`: `"bf16"` or `"fp32"`."""
    return "bf16" if _has("amx_tile", "bf16") else "fp32"


def fast_setting() -> str:
    """Return the setting that `fp32="fast"` stands for.

    Without matrix units oneDNN is quicker than the usual library if the processor has vectors of 512 bits.
    """
    return ONEDNN if fast_format() == "bf16" or _has("avx512_f") else USUAL


@cache
def _has(*names: str) -> bool:
    found = _capabilities()
    return any(found.get(name, False) for name in names)


def _capabilities() -> Mapping[str, Any]:
    """Return torch's answer, or that of the operating system's kernel if torch is too old to answer."""
    if GET_CAPABILITIES.present:
        return torch.cpu.get_capabilities()
    listed = _CPUINFO.read_text(encoding="utf-8") if _CPUINFO.is_file() else ""
    flags = next((line.split() for line in listed.splitlines() if line.startswith(("flags", "Features"))), [])
    return {_TORCH_NAMES.get(flag, flag): True for flag in flags}


class with_setting:  # noqa: N801  # used as a function
    """Context manager of one of torch's settings for fp32 products; quicker than a generator, for use in kernels."""

    def __init__(self, setting: str) -> None:
        self._setting = setting

    def __enter__(self) -> None:
        self._before = torch._C._get_float32_matmul_precision()
        _set(self._setting)

    def __exit__(self, *error: object) -> None:
        _set(self._before)

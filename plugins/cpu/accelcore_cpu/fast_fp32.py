"""fp32 products through oneDNN in place of torch's usual library: on some CPUs much quicker, and as exact.

torch has a setting for it, `"medium"`, meant for bf16. What oneDNN then computes depends on the CPU: where it has
matrix units for bf16 it uses them, and elsewhere it multiplies in fp32. So the product itself is asked.
"""

from __future__ import annotations

import platform
from functools import cache

import torch

from accelcore.roles.precision import Work
from accelcore_cpu.bargain import Bargain

__all__ = ["SETTING", "format_of_fast", "is_quicker", "pays", "with_setting"]

SETTING = "medium"
_USUAL = "highest"

_set = torch._C._set_float32_matmul_precision


class with_setting:  # noqa: N801  # used as a function
    """A context of one of torch's settings: for a kernel, quicker than a generator."""

    def __init__(self, setting: str) -> None:
        self._setting = setting

    def __enter__(self) -> None:
        self._before = torch._C._get_float32_matmul_precision()
        _set(self._setting)

    def __exit__(self, *error: object) -> None:
        _set(self._before)


@cache
def format_of_fast() -> str:
    """In what format products are computed under the setting: `"fp32"`, or `"bf16"`."""
    if torch.cpu._is_amx_tile_supported():
        return "bf16"
    # To ask takes as long as oneDNN needs to start, and of these the answer is known.
    return "fp32" if platform.machine() in ("x86_64", "AMD64") or _keeps_all() else "bf16"


def _keeps_all() -> bool:
    generator = torch.Generator().manual_seed(0)
    numbers, one = torch.randn(128, 128, generator=generator), torch.eye(128)
    with with_setting(SETTING):
        return torch.equal(numbers @ one, numbers)


@cache
def is_quicker() -> bool:
    """Whether a large product is quicker under the setting on this machine, and as exact; asked once."""
    return _keeps_all() and bargain().gain > 0


@cache
def bargain() -> Bargain:
    """What the setting costs for each product, and gains for each of its operations."""
    large, small = torch.ones(384, 384), torch.ones(32, 32)

    def run(setting: str, matrix: torch.Tensor) -> None:
        with with_setting(setting):
            torch.mm(matrix, matrix)

    return Bargain.measure(run, (_USUAL, SETTING), small, large, operations=2 * 384**3)


def pays(work: Work) -> bool:
    """Whether such a forward pass, and backward with twice its products, gain more by the setting than they lose."""
    return bargain().of(work.products, work.operations) > 0

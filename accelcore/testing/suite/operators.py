"""Conformance of the device's operators: torch's own samples against float64 on the CPU, and results known by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from accelcore import Backend
from accelcore.testing.suite.lists import ListTests
from accelcore.testing.suite.modules import ModuleTests
from accelcore.testing.support.composed import is_composed
from accelcore.testing.support.declared import refused
from accelcore.testing.support.found import Found, is_refusal, known_faults
from accelcore.testing.support.known import KNOWN
from accelcore.testing.support.rows import ROWS, compare_rows
from accelcore.testing.support.samples import FRAGILE, SAMPLED, operators
from accelcore.testing.support.sweep import compare, compare_options
from accelcore.testing.support.usable import DeviceTests

PARTS = 20  # of the operators, each a test


def check(accel: Backend, name: str, count: int, record: Callable[[str, object], None]) -> None:
    """Compare an operator on `count` samples a dtype; skip the test if the device refuses it."""
    if name in FRAGILE:
        pytest.skip(f"{name}: torch's kernel on the CPU may crash, so there is nothing to compare with")
    info = operators()[name]
    state = accel.runtime.rng_state()
    with accel.precision.fp32("ieee"):
        dtypes = [*_floating(accel), torch.int64, torch.bool]
        found = compare(accel.device, name, info, dtypes, count, known_faults(accel))
    accel.runtime.set_rng_state(state)
    _report(found, name, record)


def check_options(accel: Backend, part: int, record: Callable[[str, object], None], *, deep: bool = False) -> None:
    """Compare a part of the operators outside `SAMPLED` with all their options; if `deep`, in all forms."""
    names = sorted(operators().keys() - {*SAMPLED, *FRAGILE})
    chosen = [name for name in names if deep or not is_composed(name, operators()[name], accel.device)]
    state = accel.runtime.rng_state()
    with accel.precision.fp32("ieee"):
        parts = chosen[part::PARTS]
        found = compare_options(accel.device, parts, _floating(accel), known_faults(accel), brief=not deep)
    accel.runtime.set_rng_state(state)
    _report(found, f"part {part} of {PARTS}", record)


def _floating(accel: Backend) -> list[torch.dtype]:
    declared = {*accel.capabilities.model_dtypes, *accel.capabilities.autocast_dtypes}
    return [getattr(torch, each) for each in sorted(declared)]


def _report(found: Found, name: str, record: Callable[[str, object], None]) -> None:
    assert not found.wrong, "\n".join(found.wrong)
    if not found.compared:
        if found.refused:
            refused(found.refused[0])
        pytest.skip(f"{name}: torch has no sample of it that runs on the CPU")
    if found.seen:
        record("known_bug", f"{name}: {'; '.join(found.seen)}")
    if found.on_host:
        record("on_host", f"{name} ({', '.join(sorted(found.on_host))})")


class TestOperators(ListTests, ModuleTests, DeviceTests):
    """Operators of training."""

    @pytest.mark.parametrize("name", SAMPLED)
    def test_operator(self, accel: Backend, name: str, record_property: Any) -> None:
        """Values and gradients are those of float64 on the CPU: in any layout, in place, with `out=`, empty."""
        check(accel, name, 2, record_property)

    @pytest.mark.parametrize("part", range(PARTS))
    def test_options(self, accel: Backend, part: int, record_property: Any) -> None:
        """Each other operator with a kernel is that of float64 on the CPU, with its options and pairs of them."""
        check_options(accel, part, record_property)

    @pytest.mark.parametrize("name", ROWS)
    def test_rows(self, accel: Backend, name: str, record_property: Any) -> None:
        """Operators that reduce or normalize rows are those of float64 on the CPU, whatever the length of a row."""
        dtypes = [each for each in _floating(accel) if each != torch.float64]
        with accel.precision.fp32("ieee"):
            found = compare_rows(accel.device, name, dtypes, known_faults(accel))
        _report(found, name, record_property)

    @pytest.mark.parametrize("what", KNOWN)
    def test_known_result(self, accel: Backend, what: str) -> None:
        """An operator gives a result that was computed without torch."""
        compute, expected = KNOWN[what]
        if (found := Found(known_faults(accel))).leaves_out(what):
            pytest.skip("; ".join(found.seen))
        try:
            with accel.precision.fp32("ieee"):  # by default, some devices round what a convolution is given
                values = compute(accel.device).detach().cpu().double().reshape(-1).tolist()
        except Exception as error:
            if not is_refusal(error):
                raise
            refused(f"{what}: {type(error).__name__}: {error}")
        assert len(values) == len(expected), f"{what}: {len(values)} numbers instead of {len(expected)}"
        for value, right in zip(values, expected, strict=True):
            same = math.isnan(value) if math.isnan(right) else math.isclose(value, right, rel_tol=2e-5, abs_tol=2e-6)
            assert same, f"{what}: {values} instead of {expected}"

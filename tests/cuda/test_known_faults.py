"""The known fault of torch's compiler for the GPU, checked on the GPU."""

from __future__ import annotations

from accelcore_cuda.known_faults import KNOWN_FAULTS, MIX_ORDER_REDUCTION

from tests.cuda.fault_probes import mix_order_reduction


def test_the_entry_is_still_true_of_the_installed_version():
    assert KNOWN_FAULTS == (MIX_ORDER_REDUCTION,), "each entry needs a probe"
    assert mix_order_reduction() == MIX_ORDER_REDUCTION.applies, f"out of date: {MIX_ORDER_REDUCTION}"

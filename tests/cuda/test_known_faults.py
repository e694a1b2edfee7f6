"""The known faults of torch's kernels and its compiler for the GPU, checked on the GPU."""

from __future__ import annotations

import pytest
from accelcore_cuda.known_faults import KNOWN_FAULTS

from tests.cuda.fault_probes import (
    efficient_attention,
    flash_attention,
    mix_order_reduction,
    pooled_gradient,
    pooled_out,
    renormed_embedding,
    running_statistics,
)

PROBES = dict(
    zip(
        KNOWN_FAULTS,
        (
            mix_order_reduction,
            pooled_gradient,
            pooled_out,
            running_statistics,
            renormed_embedding,
            flash_attention,
            efficient_attention,
        ),
        strict=True,
    )
)


@pytest.mark.parametrize("fault", PROBES, ids=lambda fault: fault.kernel)
def test_each_entry_is_still_true_of_the_installed_version(fault):
    assert PROBES[fault]() == fault.applies, f"out of date: {fault}"

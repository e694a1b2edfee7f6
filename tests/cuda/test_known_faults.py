"""The known faults of torch's kernels and its compiler for the GPU, checked on the GPU."""

from __future__ import annotations

import pytest
from accelcore_cuda.known_faults import KNOWN_FAULTS

from tests.cuda.fault_probes import (
    copied_negative,
    efficient_attention,
    eigenvalues,
    flash_attention,
    layer_norm_of_planes,
    mean_of_whole,
    mix_order_reduction,
    out_with_gaps,
    pooled_gradient,
    renormed_embedding,
    running_statistics,
    scans,
)

PROBES = dict(
    zip(
        KNOWN_FAULTS,
        (
            mix_order_reduction,
            pooled_gradient,
            out_with_gaps,
            running_statistics,
            renormed_embedding,
            scans,
            copied_negative,
            eigenvalues,
            layer_norm_of_planes,
            mean_of_whole,
            flash_attention,
            efficient_attention,
        ),
        strict=True,
    )
)


@pytest.mark.parametrize("fault", PROBES, ids=lambda fault: fault.kernel)
def test_each_entry_is_still_true_of_the_installed_version(fault):
    assert PROBES[fault]() == fault.applies, f"out of date: {fault}"

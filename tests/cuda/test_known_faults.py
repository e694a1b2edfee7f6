"""The faults of the GPU's kernels and compilers, asked of the GPU."""

from __future__ import annotations

import pytest
from accelcore_cuda.known_faults import KNOWN_FAULTS


@pytest.mark.parametrize("fault", KNOWN_FAULTS, ids=lambda fault: fault.probe.rpartition(":")[2])
def test_each_entry_is_still_true_of_the_installed_version(fault):
    answer = fault.still_wrong()
    assert answer is not None, "there is a GPU"
    assert answer == fault.applies, f"out of date for {fault.package} {fault.installed}: {fault}"

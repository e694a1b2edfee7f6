"""The table of torch_npu's faults, asked on the emulated NPU: what is not its own there answers that it cannot tell."""

from __future__ import annotations

import npu_fault_probes as fault_probes
import pytest
from accelcore_npu.known_faults import KNOWN_FAULTS

KERNEL = "torch._fused_adamw_ on an NPU"


@pytest.mark.parametrize("fault", KNOWN_FAULTS, ids=lambda fault: fault.kernel)
def test_each_is_still_true_of_the_installed_version(accel, fault):
    answer = fault_probes.PROBES[fault.kernel]()
    if fault.kernel == KERNEL:
        assert answer is None, "the emulated kernel is not torch_npu's"
    else:
        assert answer == fault.applies, f"out of date for {fault.package} {fault.installed}: {fault}"


def test_the_probes_find_our_own_classes_right(accel, monkeypatch):
    """A probe that calls everything wrong would find nothing out."""
    for name in ("SGD", "BertAdam", "Adam"):
        lower, options = name.lower(), fault_probes._OPTIONS.pop(getattr(fault_probes.optim, f"NpuFused{name}"))

        def kind(parameters, *, _name=lower, **given):
            return accel.optimizers.create(_name, parameters, route="npu_fused", **given)

        monkeypatch.setattr(fault_probes.optim, f"NpuFused{name}", kind)
        monkeypatch.setitem(fault_probes._OPTIONS, kind, options)
    monkeypatch.setattr(
        fault_probes, "_OPTIONS", {k: v for k, v in fault_probes._OPTIONS.items() if not isinstance(k, type)}
    )
    assert not fault_probes.late_gradient_lost()
    assert not fault_probes.stale_gradients()
    assert not fault_probes.loaded_state_ignored()
    assert not fault_probes.steps_uncounted()
    assert not fault_probes.clipped_by_first_group()

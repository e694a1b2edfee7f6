"""Conformance: the backend as a whole, its plugin and its declaration."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest
import torch

import accelcore
from accelcore import Backend, Capabilities
from accelcore.testing.support.declared import FAST_FP32, LOW_PRECISION, MODEL_DTYPES, STRATEGIES, TABLES
from accelcore.testing.support.usable import DeviceTests

_TESTED = {
    "autocast_dtypes": LOW_PRECISION,
    "autocast_tables": TABLES,
    "model_dtypes": MODEL_DTYPES,
    "parallel": STRATEGIES,
}
_PROBE = """
import sys
import accelcore
probe = accelcore.installed()[sys.argv[1]]
if not probe.available:  # no assert: -O would take it out
    sys.exit(f"the probe says that it is not available: {probe.reason}")
if probe.count < 1:
    sys.exit(f"the probe counts {probe.count} devices")
if "torch" in sys.modules:
    sys.exit("the probe imported torch")
"""


class TestBackend(DeviceTests):
    """The device, its plugin and its declaration."""

    def test_probe_is_light(self, accel: Backend) -> None:
        """The probe reports that the device works, without importing torch."""
        result = subprocess.run(  # noqa: S603  # this Python, on a program of this file
            [sys.executable, "-c", _PROBE, accel.name], capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 0, result.stderr

    def test_probe_states_its_interface(self, accel: Backend) -> None:
        """The probe states the version of the plugin interface that it was written for."""
        api = accelcore.installed()[accel.name].api
        if api is None:
            pytest.skip("the probe does not state api=, which counts as version 1: write the number")
        assert max(1, accelcore.API - 1) <= api <= accelcore.API

    def test_selected_by_name(self, accel: Backend) -> None:
        """`select("name:index")` gives this backend, and a second one does not disturb the first."""
        twin = accelcore.select(f"{accel.name}:{accel.index}")
        assert (twin.name, twin.index, twin.capabilities) == (accel.name, accel.index, accel.capabilities)
        assert twin.device == accel.device
        assert twin.optimizers is not accel.optimizers, "two backends share one registry of optimizers"

    def test_travels(self, accel: Backend) -> None:
        """A copied backend is the same object; an unpickled one has the same device."""
        assert copy.deepcopy({"accel": accel})["accel"] is accel, "a copy is another backend"
        twin = pickle.loads(pickle.dumps(accel))  # noqa: S301  # pickled here
        assert isinstance(twin, Backend), "what is unpickled is no backend"
        assert (twin.name, twin.device) == (accel.name, accel.device)

    def test_loading(self, accel: Backend) -> None:
        """A loader for this device pins its batches if that is declared, and does not change them."""
        rows = torch.arange(4.0)
        batches = list(torch.utils.data.DataLoader(rows, batch_size=2, **accel.loading()))  # type: ignore[arg-type]
        pinned = [batch.is_pinned() for batch in batches]
        assert pinned == [accel.capabilities.pinned_memory] * 2, "batches are not pinned as declared"
        assert torch.equal(torch.cat(batches), rows)

    def test_every_device_is_one(self, accel: Backend) -> None:
        """As many devices as the probe counts can be selected, each under its index."""
        found = [accelcore.select(f"{accel.name}:{index}") for index in range(accelcore.installed()[accel.name].count)]
        assert [each.index for each in found] == list(range(len(found)))
        assert len({str(each.device) for each in found}) == len(found), "two indices are one device"

    def test_selection_changes_nothing(self, accel: Backend) -> None:
        """Selecting draws no random number, seeds nothing, and leaves torch's settings as they are."""

        def settings() -> list[object]:
            return [
                torch.get_rng_state().tolist(), torch.get_default_dtype(), torch.get_float32_matmul_precision(),
                torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(), torch.get_num_threads(),
                torch.ones(1).device,
            ]  # fmt: skip

        before = settings()
        accelcore.select(f"{accel.name}:{accel.index}")
        assert settings() == before

    def test_declaration_is_readable(self, accel: Backend) -> None:
        """The declaration holds only words that the suite has a test for, each once."""
        declaration = accel.capabilities
        assert isinstance(declaration, Capabilities)
        for field in dataclasses.fields(declaration):
            value = getattr(declaration, field.name)
            if isinstance(field.default, bool):
                assert isinstance(value, bool), f"{field.name} is {value!r}, neither True nor False"
            elif isinstance(field.default, tuple):
                assert isinstance(value, tuple), f"{field.name} is {value!r}, and no tuple"
                assert all(isinstance(name, str) and name == name.strip() and name for name in value), field.name
                assert len(set(value)) == len(value), f"{field.name} says something twice"
        for field_name, tested in _TESTED.items():
            untested = sorted(set(getattr(declaration, field_name)) - set(tested))
            assert not untested, f"{field_name} declares {', '.join(untested)}; tested are {', '.join(tested)}"
        fast = declaration.fast_fp32
        assert fast is None or fast in FAST_FP32, f"fast_fp32 declares {fast!r}; tested are {', '.join(FAST_FP32)}"
        if declaration.autocast_dtypes:
            assert "torch" in declaration.autocast_tables, "autocast is by torch's table unless another is asked for"
        assert "none" in declaration.parallel, "training in one process is always possible"
        assert "float32" in declaration.model_dtypes, "fp32 is what everything else is compared with"

    def test_tensors_are_on_the_device(self, accel: Backend) -> None:
        """A tensor made on `accel.device` is on that device, and so are results computed from it."""
        assert isinstance(accel.device, torch.device)
        ones = torch.ones(3, device=accel.device)
        assert ones.device == accel.device, f"asked for {accel.device}, the tensor is on {ones.device}"
        assert (ones + 1).device == ones.device
        assert (ones + 1).cpu().tolist() == [2.0, 2.0, 2.0]

from __future__ import annotations

import logging
import sys
import types

import pytest
import torch
import torch_npu
from accelcore_npu_emulator import Settings
from by_hand import trains_in_fp16_as_by_hand

import accelcore
from accelcore.errors import BackendUnavailableError, UnsupportedError


def test_the_real_torch_npu_runs_on_the_emulated_npu_and_says_so(accel):
    assert (accel.name, accel.index, accel.emulated) == ("npu", 0, True)
    assert accel.device == torch.device("npu", 0)
    assert accelcore.installed()["npu"].reason.startswith("EMULATED")
    assert torch_npu.npu.get_device_name(0) == Settings.from_environment().soc


def test_each_device_is_a_backend_of_its_own(accel):
    other = accelcore.select("npu:1")
    assert other.device == torch.device("npu", 1)
    assert other.optimizers is not accel.optimizers
    values = [torch.ones(2, device=backend.device).sum() for backend in (accel, other)]
    assert [value.device.index for value in values] == [0, 1]
    with pytest.raises(BackendUnavailableError, match="no device npu:2"):
        accelcore.select("npu:2")
    accelcore.select("npu:0")


def test_it_is_what_auto_chooses(accel):
    assert accelcore.select().name == "npu"


def test_what_is_declared_fits_the_part(accel):
    able = accel.capabilities
    assert able.autocast_dtypes == ("bfloat16", "float16")
    assert able.model_dtypes == ("float32", "bfloat16", "float16")
    assert able.parallel == ("none", "ddp", "combine_ddp", "zero1", "fsdp", "zero2", "zero3")
    assert able.fast_fp32 == "hf32"
    assert able.process_groups == ("hccl", "gloo")
    assert (able.streams, able.graphs, able.pinned_memory, able.overflow_flag) == (True, False, True, False)
    for value in vars(able).values():
        assert isinstance(value, str | bool | None) or all(isinstance(word, str) for word in value)


def test_an_fp16_model_with_fp32_masters_trains_as_the_loop_by_hand(accel):
    trains_in_fp16_as_by_hand(accel)


def test_a_dtype_that_is_not_declared_is_refused(accel):
    model = torch.nn.Linear(2, 1).double()
    with pytest.raises(UnsupportedError, match="float64"):
        accel.trainer(model, accel.optimizers.create("sgd", model.parameters(), lr=0.1))


def test_the_settings_are_recorded(caplog):
    with caplog.at_level(logging.INFO, "accelcore"):
        accelcore.select("npu:0")
    assert "npu:0: jit_compile=False, allow_internal_format=False" in caplog.messages


def test_a_torch_npu_that_cannot_be_imported_is_an_error_with_its_cause(monkeypatch):
    from accelcore_npu.backend import create

    class Broken(types.ModuleType):
        def find_spec(self, name, path=None, target=None):
            if name == "torch_npu":
                raise ImportError("libhccl.so: cannot open shared object file\nand more")

    monkeypatch.delitem(sys.modules, "torch_npu")
    monkeypatch.setattr(sys, "meta_path", [Broken("broken"), *sys.meta_path])
    monkeypatch.delenv("ACCEL_EMULATE")
    with pytest.raises(BackendUnavailableError, match="torch_npu cannot be imported") as caught:
        create(0)
    assert caught.value.why == "ImportError: libhccl.so: cannot open shared object file"
    assert "doctor" in caught.value.remedy
    assert isinstance(caught.value.__cause__, ImportError)

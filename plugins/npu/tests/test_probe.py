from __future__ import annotations

import os
import subprocess
import sys
import types
from importlib.metadata import PackageNotFoundError

import accelcore_npu
import pytest
from accelcore_npu import detection, libraries

import accelcore
from accelcore.devices.plugins import Declared
from accelcore.errors import BackendUnavailableError


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine on which an NPU works; tests take things away from it."""

    class Machine:
        devices = tmp_path / "dev"
        cann_fault = None
        cann = "9.1.0"

    Machine.packages = {"torch": "2.12.0+cpu", "torch-npu": "2.12.0"}
    Machine.requirements = []
    Machine.devices.mkdir()
    for name in ("davinci0", "davinci3", "davinci12", "davinci_manager"):
        (Machine.devices / name).touch()

    def version(package):
        try:
            return Machine.packages[package]
        except KeyError:
            raise PackageNotFoundError(package) from None

    monkeypatch.setattr(detection, "_DEVICES", Machine.devices)
    monkeypatch.setattr(detection, "version", version)
    monkeypatch.setattr(detection, "requires", lambda package: Machine.requirements)
    monkeypatch.setattr(detection, "autoloads", list)
    monkeypatch.setattr(libraries, "cann_fault", lambda environ: Machine.cann_fault)
    monkeypatch.setattr(libraries, "cann_version", lambda environ: Machine.cann)
    monkeypatch.delenv("ACCEL_EMULATE", raising=False)
    return Machine


def probe():
    answer = accelcore_npu.accelcore_probe()
    assert (answer.name, answer.api, answer.exclusive, answer.priority) == ("npu", accelcore.API, True, 100)
    assert "ASCEND_RT_VISIBLE_DEVICES" in answer.environment
    assert answer.distributions == ("torch-npu",)
    return answer


def refused():
    answer = probe()
    assert not answer.available
    return answer.reason, answer.remedy


def test_where_everything_fits_it_is_available(machine):
    answer = probe()
    assert (answer.available, answer.count) == (True, 3)
    assert answer.reason == "3 Ascend NPUs, torch-npu 2.12.0, CANN 9.1.0"


def test_without_an_npu_it_says_so_and_no_more(machine):
    for path in machine.devices.glob("davinci?*"):
        path.unlink()
    (machine.devices / "davinci0_caps").touch()
    del machine.packages["torch-npu"]
    machine.cann_fault = ("CANN is not set up", "install CANN")
    assert refused() == (
        "there is no Ascend NPU (no /dev/davinci*)",
        "if there is an NPU, install its driver; npu-smi info shows it",
    )
    assert probe().absent


def test_without_an_npu_it_also_says_what_is_installed_and_cannot_work(machine):
    for path in machine.devices.glob("davinci?*"):
        path.unlink()
    machine.cann_fault = ("CANN is not set up", "install CANN")
    reason, remedy = refused()
    assert reason == "there is no Ascend NPU (no /dev/davinci*); CANN is not set up"
    assert remedy == "if there is an NPU, install its driver; npu-smi info shows it; install CANN"


def test_without_torch_npu_it_names_the_one_that_fits(machine):
    del machine.packages["torch-npu"]
    reason, remedy = refused()
    assert reason == "torch-npu is not installed"
    assert "torch-npu==2.12.0'" in remedy
    machine.cann = "8.5.0"
    assert "torch-npu==2.12.0rc1'" in refused()[1]


def test_a_torch_npu_for_another_torch_does_not_fit(machine):
    machine.packages["torch"] = "2.11.0"
    reason, remedy = refused()
    assert reason == "torch-npu 2.12.0 is built for torch 2.12.0, and torch 2.11.0 is installed"
    assert "torch-npu==2.11.0'" in remedy


def test_a_cann_that_lacks_something_is_a_reason(machine):
    machine.cann_fault = ("CANN at /x lacks libhccl.so", "repair it")
    assert refused() == machine.cann_fault
    assert not probe().absent


def test_another_cann_than_the_published_one_is_mentioned_and_stops_nothing(machine):
    machine.cann = "8.5.0"
    answer = probe()
    assert answer.available
    assert "was released for CANN 9.1.0" in answer.reason
    machine.packages = {"torch": "2.13.0", "torch-npu": "2.13.0"}
    assert probe().reason == "3 Ascend NPUs, torch-npu 2.13.0, CANN 8.5.0"


# ASCEND_RT_VISIBLE_DEVICES


@pytest.mark.parametrize(("value", "count"), [("0", 1), ("1,2", 2), ("0,1,2", 3)])
def test_visible_devices_are_counted(machine, monkeypatch, value, count):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", value)
    assert (probe().available, probe().count, probe().visible_devices) == (True, count, "ASCEND_RT_VISIBLE_DEVICES")


@pytest.mark.parametrize("value", ["", "  ", "x", "0,", "0, 1", "-1", "0;1", "\u0661", "0.5", "1" * 50])
def test_a_list_that_cann_would_not_read_is_refused(machine, monkeypatch, value):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", value)
    reason, remedy = refused()
    assert reason.startswith("ASCEND_RT_VISIBLE_DEVICES=")
    assert "0,1" in remedy


@pytest.mark.parametrize(("value", "reason"), [("1,0", "ascending"), ("0,0", "ascending"), ("0,3", "names device 3")])
def test_invalid_numbers_are_refused(machine, monkeypatch, value, reason):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", value)
    assert reason in refused()[0]


# Another accelerator


@pytest.mark.parametrize(
    ("torch", "requirements"),
    [("2.12.0+cu130", []), ("2.12.0", ["nvidia-cublas; platform_system == 'Linux'", "sympy"])],
)
def test_a_cuda_build_of_torch_is_in_the_way_where_there_is_a_gpu(machine, torch, requirements):
    machine.packages["torch"] = torch
    machine.requirements = requirements
    assert probe().available
    assert "built for CUDA" in probe().reason
    (machine.devices / "nvidiactl").touch()
    reason, remedy = refused()
    assert "built for CUDA" in reason
    assert "CPU build of torch" in remedy


def test_a_gpu_beside_a_cpu_build_is_in_nobodys_way(machine):
    (machine.devices / "nvidiactl").touch()
    assert probe().reason == "3 Ascend NPUs, torch-npu 2.12.0, CANN 9.1.0"


def test_another_plugin_of_torch_is_named(machine, monkeypatch):
    points = [
        Declared("torch_npu", "torch_npu:_autoload", "torch_npu", "2.13.0"),
        Declared("hpu", "habana_frameworks:__autoload", "habana-torch-plugin", "1.0"),
    ]
    monkeypatch.setattr(detection, "autoloads", lambda: points)
    assert probe().available
    assert "habana-torch-plugin" in probe().reason
    assert "loads torch_npu" not in probe().reason


def test_transfer_to_npu_is_noticed_and_its_torch_cuda_is_not_asked(machine, monkeypatch):
    class Patched(types.ModuleType):
        def __getattr__(self, name):
            raise AssertionError(f"the probe asked torch.{name}")

    monkeypatch.setitem(sys.modules, "torch_npu.contrib.transfer_to_npu", types.ModuleType("transfer_to_npu"))
    monkeypatch.setitem(sys.modules, "torch", Patched("torch"))
    answer = probe()
    assert (answer.available, answer.count) == (True, 3)
    assert "transfer_to_npu is active" in answer.reason


# Emulated


@pytest.fixture
def bare_machine(machine):
    for path in machine.devices.glob("davinci?*"):
        path.unlink()
    machine.cann_fault = ("CANN is not set up", "install CANN")
    return machine


def test_an_emulated_npu_needs_neither_device_nor_cann_and_says_what_it_is(bare_machine, monkeypatch):
    monkeypatch.setenv("ACCEL_EMULATE", "npu")
    monkeypatch.setattr(detection, "emulated_devices", lambda: 2)
    answer = probe()
    assert (answer.available, answer.count) == (True, 2)
    assert answer.reason.startswith("EMULATED")
    monkeypatch.setattr(detection, "emulated_devices", lambda: 5)
    assert probe().count == 5
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1,4")
    assert probe().count == 2
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1,5")
    reason, _ = refused()
    assert reason.startswith("EMULATED: ASCEND_RT_VISIBLE_DEVICES='1,5' names device 5, and there are 5")


def test_without_an_emulated_cann_it_says_what_to_install_or_how_to_start(bare_machine, monkeypatch):
    monkeypatch.setenv("ACCEL_EMULATE", "npu")
    monkeypatch.setattr(detection, "emulated_devices", lambda: None)
    reason, remedy = refused()
    assert reason == "EMULATED: ACCEL_EMULATE=npu is set, and accelcore-npu-emulator is not installed"
    assert "pip install ./plugins/npu_emulator in a clone" in remedy
    bare_machine.packages["accelcore-npu-emulator"] = "0.1.0"
    reason, remedy = refused()
    assert "not in LD_LIBRARY_PATH" in reason
    assert remedy.startswith("start with accelcore run --emulate npu")
    monkeypatch.setattr(detection, "emulated_devices", lambda: 0)
    assert "ACCEL_EMULATED_..." in refused()[0]


def test_an_emulated_npu_needs_a_torch_npu_that_fits(bare_machine, monkeypatch):
    monkeypatch.setenv("ACCEL_EMULATE", "npu")
    monkeypatch.setattr(detection, "emulated_devices", lambda: 2)
    bare_machine.packages["torch"] = "2.11.0"
    reason, remedy = refused()
    assert reason == "EMULATED: torch-npu 2.12.0 is built for torch 2.12.0, and torch 2.11.0 is installed"
    assert "pip install" in remedy
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "7")
    both = refused()
    assert both[0].startswith(f"{reason}; ASCEND_RT_VISIBLE_DEVICES='7' names device 7")
    assert both[1].startswith(f"{remedy}; unset it")


def test_an_empty_wish_to_emulate_is_none(machine, monkeypatch):
    without = accelcore_npu.accelcore_probe()
    monkeypatch.setenv("ACCEL_EMULATE", "")
    assert accelcore_npu.accelcore_probe() == without


@pytest.mark.parametrize("value", ["NPU", "1", "npu ", "cuda"])
def test_what_cannot_be_emulated_is_refused(machine, monkeypatch, value):
    monkeypatch.setenv("ACCEL_EMULATE", value)
    assert "ACCEL_EMULATE" in refused()[0]


# The plugin


def test_selecting_it_gives_its_reason_and_remedy(machine):
    del machine.packages["torch-npu"]
    with pytest.raises(BackendUnavailableError) as caught:
        accelcore.select("npu")
    assert (caught.value.why, caught.value.remedy) == refused()


def test_the_name_of_another_is_left_to_others():
    assert accelcore_npu.accelcore_create_backend(name="cpu", index=0) is None


@pytest.mark.parametrize("emulate", ["", "npu"])
def test_the_probe_imports_neither_torch_nor_the_vendors_runtime(emulate):
    heavy = {"torch", "torch_npu", "numpy"} | (set() if emulate else {"accelcore_npu_emulator"})  # which reads settings
    script = f"import sys, accelcore_npu as a; a.accelcore_probe(); assert not {heavy} & set(sys.modules), sys.modules"
    environ = {**os.environ, "ACCEL_EMULATE": emulate}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240, env=environ)

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import accelcore_cuda
import pytest

import accelcore
from accelcore.errors import BackendUnavailableError


def probe(available):
    answer = accelcore_cuda.accelcore_probe()
    assert (answer.name, answer.api, answer.exclusive, answer.priority) == ("cuda", accelcore.API, True, 100)
    assert answer.available is available, answer.reason
    assert answer.remedy or available
    return answer


# What works.


def test_the_variable_that_it_states_hides_devices(machine, monkeypatch):
    monkeypatch.setenv(probe(True).visible_devices, "1")
    assert probe(True).count == 1


def test_where_nothing_is_missing_it_says_what_is_there(machine):
    answer = probe(True)
    assert answer.count == 2
    assert answer.reason == "2 NVIDIA GPUs, driver 580.65.06, torch 2.13.0+cu130 for CUDA 13.0"


def test_a_container_without_proc_is_no_obstacle(machine):
    (machine.proc / "version").unlink()
    assert "driver 580.65.06" in probe(True).reason


def test_a_driver_whose_version_is_nowhere_is_not_judged(machine):
    machine.library("1.1")
    machine.kernel("nothing that can be read")
    assert "driver of unknown version" in probe(True).reason


def test_the_kernel_modules_version_is_read_where_the_librarys_cannot(machine):
    machine.library("1.1")
    machine.kernel("NVRM version: NVIDIA UNIX x86_64 Kernel Module  595.10  Sat Aug 19 01:15:15 UTC 2026\n")
    assert "driver 595.10," in probe(True).reason
    (machine.proc / "version").unlink()
    (machine.sys / "version").write_text("596.20.01\n")
    assert "driver 596.20.01," in probe(True).reason


def test_a_library_of_another_driver_than_the_kernel_module_is_mentioned(machine):
    machine.kernel("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n")
    assert probe(True).reason.endswith("libcuda.so.1 is of driver 580.65.06, the kernel module of 535.104.05")


def test_the_library_is_looked_for_where_the_linker_looks_first(machine, monkeypatch):
    compat = machine.root / "compat"
    compat.mkdir()
    (compat / "libcuda.so.1").symlink_to("libcuda.so.590.44.01")
    (compat / "libcuda.so.590.44.01").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{compat}")
    assert "driver 590.44.01," in probe(True).reason


def test_one_gpu_is_said_in_the_singular(machine):
    (machine.dev / "nvidia12").unlink()
    answer = probe(True)
    assert answer.count == 1
    assert answer.reason.startswith("1 NVIDIA GPU, ")


# What does not.


def test_without_a_driver_it_says_so(machine):
    machine.no_nvidia()
    answer = probe(False)
    assert answer.reason == "no NVIDIA driver is loaded (there is no /dev/nvidiactl)"
    assert answer.remedy == "install the NVIDIA driver for your GPU"


def test_a_driver_without_a_gpu_is_not_enough(machine):
    for name in ("nvidia0", "nvidia12"):
        (machine.dev / name).unlink()
    (machine.dev / "nvidia-modeset").touch()
    (machine.dev / "nvidia0-caps").touch()
    answer = probe(False)
    assert answer.reason == "the NVIDIA driver is loaded, but it shows no GPU"
    assert "nvidia-smi" in answer.remedy


def test_a_gpu_that_this_user_may_not_open_is_not_there(machine, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert probe(False).reason == "this user may not open /dev/nvidiactl"


def test_a_container_without_the_drivers_library_is_not_enough(machine):
    (machine.lib / "libcuda.so.1").unlink()
    answer = probe(False)
    assert answer.reason == "there is an NVIDIA GPU, and the driver's libcuda.so.1 is not found"
    assert "--gpus all" in answer.remedy
    (machine.root / "ld.so.cache").unlink()
    assert probe(False).reason == answer.reason
    machine.links = True  # in a folder that only the dynamic linker knows
    assert "driver 580.65.06" in probe(True).reason


@pytest.mark.parametrize("value", ["", "-1", " ", " -1 ", "-1,0", ",0", "2", "nonsense", "GPU-9", "GPU-8f2"])
def test_hidden_gpus_are_not_there(machine, monkeypatch, value):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    answer = probe(False)
    assert answer.reason == f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU"
    assert "CUDA_VISIBLE_DEVICES" in answer.remedy


def test_a_list_that_ends_early_is_mentioned(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,7,0")
    answer = probe(True)
    assert answer.count == 1
    assert answer.reason.endswith("CUDA_VISIBLE_DEVICES='1,7,0' ends at '7', which names no GPU")


@pytest.mark.parametrize(
    ("uuid", "value", "count"), [("GPU-8f2c22bb-2", "GPU-8f2c", 1), ("GPU-????????-????", "GPU-8f2c,GPU-8f2d", 2)]
)
def test_uuids_are_looked_up_where_the_driver_shows_them(machine, monkeypatch, uuid, value, count):
    machine.uuids("GPU-8f2b11aa-1", uuid)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert probe(True).count == count


def test_without_torch_it_says_so(machine):
    machine.torch = None
    answer = probe(False)
    assert (answer.reason, answer.remedy) == ("torch is not installed", "pip install torch")


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.13.0+cpu.cxx11.abi", "2.13.0+xpu"])
def test_a_torch_built_for_something_else_is_not_enough(machine, version):
    machine.torch = version
    answer = probe(False)
    assert answer.reason == f"torch {version} is built without CUDA"
    assert answer.remedy == "install a CUDA build of torch"


@pytest.mark.parametrize(
    ("torch", "driver", "minimum"),
    [("+cu130", "570.86.15", "580"), ("+cu126", "525.60.12", "525.60.13"), ("+cu118", "450.51", "450.80.02")],
)
def test_a_driver_that_is_too_old_is_named_with_the_one_that_is_needed(machine, torch, driver, minimum):
    machine.torch = f"2.13.0{torch}"
    machine.driver(driver)
    answer = probe(False)
    assert answer.reason.startswith(f"the NVIDIA driver {driver} is too old for torch 2.13.0{torch} for CUDA")
    assert answer.reason.endswith(f"which needs {minimum} or newer")
    assert "newer driver" in answer.remedy


@pytest.mark.parametrize(("torch", "driver"), [("+cu126", "525.60.13"), ("+cu130", "580.0"), ("+cu990", "400.1.1")])
def test_a_driver_that_is_new_enough_or_cannot_be_judged_is_taken(machine, torch, driver):
    machine.torch = f"2.13.0{torch}"
    machine.driver(driver)
    probe(True)


def test_a_newer_library_makes_up_for_an_old_kernel_module(machine):
    machine.driver("535.104.05")
    machine.library("580.65.06")
    probe(True)


# Windows.


def test_wsl_without_a_driver_in_windows(machine):
    machine.no_nvidia()
    (machine.dev / "dxg").touch()
    answer = probe(False)
    assert "this is WSL2" in answer.reason
    assert answer.remedy == "install the NVIDIA driver in Windows, not in Linux"


@pytest.mark.parametrize(("value", "count"), [(None, 1), ("0", 1), ("0,1", 2)])
def test_wsl_counts_one_gpu_or_those_that_are_named(machine, monkeypatch, value, count):
    machine.no_nvidia()
    (machine.dev / "dxg").touch()
    (machine.wsl / "libcuda.so.1").touch()
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    answer = probe(True)
    assert answer.count == count
    assert ("name them in CUDA_VISIBLE_DEVICES" in answer.reason) is (value is None)


def test_wsl_with_hidden_gpus(machine, monkeypatch):
    machine.no_nvidia()
    (machine.dev / "dxg").touch()
    (machine.wsl / "libcuda.so.1").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert probe(False).reason == "CUDA_VISIBLE_DEVICES='-1' hides every GPU"


def test_a_driver_without_device_files(machine):
    machine.no_device_files()
    answer = probe(False)
    assert answer.reason == "the NVIDIA driver is loaded, and there is no /dev/nvidiactl"
    assert "nvidia-smi" in answer.remedy
    assert "--gpus all" in answer.remedy


def test_device_files_that_the_first_use_will_make(machine):
    machine.no_device_files()
    machine.modprobe.touch()
    assert probe(True).count == 2


# AMD.


@pytest.fixture
def rocm(machine):
    machine.no_nvidia()
    machine.torch = "2.13.0+rocm7.1"
    return machine


def test_a_rocm_build_works_as_cuda_and_says_so(rocm):
    rocm.amd(0, 256, 256)
    answer = probe(True)
    assert answer.count == 2
    assert answer.reason == "2 AMD GPUs through ROCm, torch 2.13.0+rocm7.1 for ROCm 7.1"
    assert (answer.slurm, answer.kubernetes, answer.ray) == ("gpu", "amd.com/gpu", "GPU")


def test_the_variable_that_a_rocm_build_states_hides_devices(rocm, monkeypatch):
    rocm.amd(0, 256, 256)
    monkeypatch.setenv(probe(True).visible_devices, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # ROCm reads its own variable first
    assert probe(True).count == 1


def test_a_rocm_build_without_an_amd_gpu(rocm):
    assert "no AMD GPU (no /dev/kfd)" in probe(False).reason
    rocm.amd(0)
    assert probe(False).reason == "AMD's driver is loaded, but it shows no GPU"


def test_an_amd_gpu_that_this_user_may_not_open(rocm, monkeypatch):
    rocm.amd(256)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    answer = probe(False)
    assert answer.reason == "this user may not open /dev/kfd"
    assert "group" in answer.remedy


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.13.0+cu130"])
def test_an_amd_gpu_beside_another_build_of_torch(rocm, version):
    rocm.amd(256)
    rocm.torch = version
    answer = probe(False)
    assert answer.reason.startswith("there is an AMD GPU, and torch ")
    assert answer.remedy == "install a ROCm build of torch"


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({"ROCR_VISIBLE_DEVICES": "1"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000003e9"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, 0),
        ({"ROCR_VISIBLE_DEVICES": "-1"}, 0),
    ],
)
def test_the_variables_of_rocm_are_honoured_in_their_order(rocm, monkeypatch, variables, count):
    rocm.amd(0, 256, 256)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    answer = probe(bool(count))
    assert answer.count == count
    assert count or f"{list(variables)[-1]}={list(variables.values())[-1]!r}" in answer.reason


# Others in the way.


def test_torch_npu_would_make_torch_fail(machine, monkeypatch):
    machine.autoloaded.append("torch_npu")
    answer = probe(False)
    assert "torch-npu is installed" in answer.reason
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in answer.remedy
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    probe(True)


def test_a_torch_that_is_imported_already_was_not_stopped(machine, monkeypatch):
    machine.autoloaded.append("torch_npu")
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    probe(True)


def test_transfer_to_npu_is_in_the_way(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu.contrib.transfer_to_npu", ModuleType("transfer_to_npu"))
    assert probe(False).reason == "transfer_to_npu is active: torch.cuda is torch.npu in this process"


def test_another_autoloaded_backend_is_mentioned(machine):
    machine.autoloaded.append("torch_other")
    assert "torch also loads torch_other" in probe(True).reason


# The doors.


def test_selecting_it_gives_its_reason_and_remedy(machine, monkeypatch):
    machine.no_nvidia()
    answer = probe(False)
    with pytest.raises(BackendUnavailableError) as caught:
        accelcore.select("cuda")
    assert caught.value.why == answer.reason
    assert caught.value.remedy == answer.remedy


def test_the_name_of_another_is_left_to_others():
    assert accelcore_cuda.accelcore_create_backend(name="cpu", index=0) is None


def test_the_probe_imports_no_torch_and_loads_no_driver():
    script = """
import sys, accelcore_cuda
accelcore_cuda.accelcore_probe()
assert "torch" not in sys.modules and "ctypes" not in sys.modules
maps = open("/proc/self/maps").read()
assert "libcuda" not in maps and "libnvidia" not in maps
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)

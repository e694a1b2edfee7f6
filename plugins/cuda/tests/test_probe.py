from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import accelcore_cuda
import pytest

import accelcore
from accelcore.errors import BackendUnavailableError


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine on which CUDA would work; tests take things away from it."""

    class Machine:
        devices = tmp_path / "dev"
        torch: str | None = "2.13.0+cu126"

    Machine.devices.mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia12"):
        (Machine.devices / name).touch()

    def version(package):
        assert package == "torch"
        if Machine.torch is None:
            raise PackageNotFoundError(package)
        return Machine.torch

    monkeypatch.setattr(accelcore_cuda, "_DEVICES", Machine.devices)
    monkeypatch.setattr(accelcore_cuda, "version", version)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Machine


def probe():
    answer = accelcore_cuda.accelcore_probe()
    assert (answer.name, answer.api, answer.exclusive) == ("cuda", accelcore.API, True)
    assert not answer.available
    assert answer.priority == 100
    return answer


def test_without_a_driver_it_says_so(machine):
    (machine.devices / "nvidiactl").unlink()
    answer = probe()
    assert "no NVIDIA driver" in answer.reason
    assert "driver" in answer.remedy


def test_a_driver_without_a_gpu_is_not_enough(machine):
    for name in ("nvidia0", "nvidia12"):
        (machine.devices / name).unlink()
    (machine.devices / "nvidia-modeset").touch()
    (machine.devices / "nvidia0-caps").touch()
    answer = probe()
    assert "shows no GPU" in answer.reason
    assert "nvidia-smi" in answer.remedy


@pytest.mark.parametrize("value", ["", "-1", " ", " -1 ", "-1,0", ",0"])
def test_hidden_gpus_are_not_there(machine, monkeypatch, value):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    answer = probe()
    assert answer.reason == f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU"
    assert "CUDA_VISIBLE_DEVICES" in answer.remedy


@pytest.mark.parametrize("value", ["0", "1,0", "0,-1", "GPU-8f2b", "MIG-1"])
def test_gpus_that_are_named_are_not_hidden(machine, monkeypatch, value):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert "no backend to drive them" in probe().reason


def test_without_torch_it_says_so(machine):
    machine.torch = None
    answer = probe()
    assert answer.reason == "torch is not installed"
    assert answer.remedy == "pip install torch"


def test_a_torch_built_for_cpus_is_not_enough(machine):
    machine.torch = "2.13.0+cpu"
    answer = probe()
    assert answer.reason == "torch 2.13.0+cpu is built without CUDA"
    assert "CUDA build" in answer.remedy


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cu126"])
def test_where_nothing_is_missing_it_says_that_this_release_has_no_backend(machine, version):
    machine.torch = version
    answer = probe()
    assert "has no backend to drive them" in answer.reason
    assert "cpu" in answer.remedy


def test_selecting_it_gives_its_reason_and_remedy(machine):
    (machine.devices / "nvidiactl").unlink()
    with pytest.raises(BackendUnavailableError) as caught:
        accelcore.select("cuda")
    assert (caught.value.why, caught.value.remedy) == (probe().reason, probe().remedy)


def test_creating_it_is_refused_with_a_reason_and_a_remedy():
    with pytest.raises(BackendUnavailableError, match="cuda:3 cannot be used") as caught:
        accelcore_cuda.accelcore_create_backend(name="cuda", index=3)
    assert "no backend" in caught.value.why
    assert caught.value.remedy


def test_the_name_of_another_is_left_to_others():
    assert accelcore_cuda.accelcore_create_backend(name="cpu", index=0) is None


def test_the_probe_imports_no_torch():
    script = "import sys, accelcore_cuda; accelcore_cuda.accelcore_probe(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)

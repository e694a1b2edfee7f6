from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import accelcore_npu
import pytest

import accelcore
from accelcore.errors import BackendUnavailableError


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine on which an NPU would work; tests take things away from it."""

    class Machine:
        devices = tmp_path / "dev"
        torch_npu: str | None = "2.13.0"

    Machine.devices.mkdir()
    for name in ("davinci0", "davinci12", "davinci_manager"):
        (Machine.devices / name).touch()

    def version(package):
        assert package == "torch-npu"
        if Machine.torch_npu is None:
            raise PackageNotFoundError(package)
        return Machine.torch_npu

    monkeypatch.setattr(accelcore_npu, "_DEVICES", Machine.devices)
    monkeypatch.setattr(accelcore_npu, "version", version)
    monkeypatch.setenv("ASCEND_HOME_PATH", "/usr/local/Ascend/latest")
    return Machine


def probe():
    answer = accelcore_npu.accelcore_probe()
    assert (answer.name, answer.api, answer.exclusive) == ("npu", accelcore.API, True)
    assert not answer.available
    assert answer.priority == 100
    return answer


def test_without_an_npu_it_says_so(machine):
    for name in ("davinci0", "davinci12"):
        (machine.devices / name).unlink()
    (machine.devices / "davinci0_caps").touch()
    answer = probe()
    assert "no Ascend NPU" in answer.reason
    assert "npu-smi" in answer.remedy


@pytest.mark.parametrize("value", [None, ""])
def test_without_cann_it_says_so(machine, monkeypatch, value):
    if value is None:
        monkeypatch.delenv("ASCEND_HOME_PATH")
    else:
        monkeypatch.setenv("ASCEND_HOME_PATH", value)
    answer = probe()
    assert "ASCEND_HOME_PATH" in answer.reason
    assert "set_env.sh" in answer.remedy


def test_without_torch_npu_it_says_so(machine):
    machine.torch_npu = None
    answer = probe()
    assert answer.reason == "torch-npu is not installed"
    assert "torch-npu" in answer.remedy


def test_where_nothing_is_missing_it_says_that_this_release_has_no_backend(machine):
    answer = probe()
    assert "has no backend to drive them" in answer.reason
    assert "cpu" in answer.remedy


def test_selecting_it_gives_its_reason_and_remedy(machine):
    machine.torch_npu = None
    with pytest.raises(BackendUnavailableError) as caught:
        accelcore.select("npu")
    assert (caught.value.why, caught.value.remedy) == (probe().reason, probe().remedy)


def test_creating_it_is_refused_with_a_reason_and_a_remedy():
    with pytest.raises(BackendUnavailableError, match="npu:3 cannot be used") as caught:
        accelcore_npu.accelcore_create_backend(name="npu", index=3)
    assert "no backend" in caught.value.why
    assert caught.value.remedy


def test_the_name_of_another_is_left_to_others():
    assert accelcore_npu.accelcore_create_backend(name="cpu", index=0) is None


def test_the_probe_imports_no_torch():
    script = "import sys, accelcore_npu; accelcore_npu.accelcore_probe(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)

"""Emulation reaches the process that asks for it and all of its children, and nobody else."""

import os
import subprocess
import sys

import pytest
from accelcore_npu_emulator import Settings, activate, active, bootstrap, native, plugin

from accelcore.errors import BackendUnavailableError, ConfigurationError

jobs = pytest.importorskip("emulated_jobs", reason="torch_npu is not installed", exc_type=ImportError)

SCRIPT = """
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __init__(self, device):
        self.device = device
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return (torch.full((2,), float(index), device=self.device) + 1).cpu()

if __name__ == "__main__":
    print("devices", torch.npu.device_count())
    print("forked", [batch.sum().item() for batch in DataLoader(Numbers("cpu"), 2, num_workers=1)])
    print("here", (torch.ones(3, device="npu") + 1).tolist())
    print("forked later", [batch.sum().item() for batch in DataLoader(Numbers("cpu"), 2, num_workers=1)])
"""
SPAWNS = """
    loader = DataLoader(Numbers("npu"), 2, num_workers=1, multiprocessing_context="spawn")
    print("spawned", [batch.sum().item() for batch in loader])
"""
RANK = """
import os
import torch
import torch.distributed as dist
rank = int(os.environ["LOCAL_RANK"])
torch.npu.set_device(rank)
dist.init_process_group("hccl")
x = torch.tensor([rank + 1.0], device="npu")
dist.all_reduce(x)
os.write(1, f"rank {rank} sum {x.item()}\\n".encode())  # one write: the ranks share their output
dist.destroy_process_group()
"""
PLAIN = {key: value for key, value in os.environ.items() if not key.startswith(("ACCEL_", "ASCEND_", "LD_"))}


def light(code, **variables):
    """Run code that needs no torch in a process that is not emulated."""
    result = subprocess.run(
        [sys.executable, "-c", code], env=PLAIN | variables, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"

    def write(text):
        path.write_text(text)
        return str(path)

    return write


def emulate(*arguments, **variables):
    """What a script wrote, started as a user would, from an environment that knows nothing of an emulation."""
    started = [sys.executable, "-m", "accelcore", "run", "--emulate", "npu", *arguments]
    environ = PLAIN | {"OMP_NUM_THREADS": "1"} | variables
    result = subprocess.run(started, env=environ, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr
    assert "EMULATED" in result.stderr
    return result.stdout


@pytest.mark.parametrize("spawns", [False, pytest.param(True, marks=pytest.mark.full)])
def test_accelcore_run_reaches_its_script_by_the_environment_and_the_scripts_children(script, spawns):
    said = emulate(script(SCRIPT + SPAWNS * spawns), ACCEL_EMULATED_DEVICES="3").splitlines()
    assert said[:4] == ["devices 3", "forked [6.0, 14.0]", "here [2.0, 2.0, 2.0]", "forked later [6.0, 14.0]"]
    assert said[4:] == ["spawned [6.0, 14.0]"] * spawns


@pytest.mark.full  # ranks have the environment of a script
def test_accelcore_run_reaches_its_ranks(script):
    assert sorted(emulate("--nproc", "2", script(RANK)).splitlines()) == ["rank 0 sum 3.0", "rank 1 sum 3.0"]


@pytest.mark.full
def test_torchrun_reaches_its_ranks(emulated_process, script):
    result = emulated_process("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script(RANK))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["rank 0 sum 3.0", "rank 1 sum 3.0"]


def test_a_child_forked_from_a_used_device_is_refused_and_does_not_hang(results):
    [(status, told, parent)] = results(jobs.use_after_fork)
    assert status == 0
    assert len(told) == 4
    assert all("EMULATED: this process was forked from one that had initialised the NPU" in line for line in told)
    assert parent == [2, 2]


def test_a_child_forked_before_may_use_the_device(results):
    assert results(jobs.use_before_fork) == [0]


@pytest.mark.parametrize(
    "variables",
    [{"ACCEL_EMULATED_POISON": "maybe"}, {"ACCEL_EMULATED_FAULTS": "overflow@0"}, {"ACCEL_EMULATED_DEVICE": "2"}],
)
def test_an_invalid_setting_is_an_error_of_the_first_use(results, variables):
    [told] = results(jobs.failure_of_first_use, **variables)
    assert "EMULATED" in told
    assert next(iter(variables)) in told


def test_host_kernels_that_fail_to_load_are_an_error_of_the_first_use(monkeypatch, capsys):
    def broken(name):
        raise ImportError("kernels are on strike")

    monkeypatch.setattr(bootstrap, "import_module", broken)
    assert "kernels are on strike" in bootstrap.start()
    assert "Traceback" in capsys.readouterr().err


def test_this_session_is_emulated():
    assert active()
    activate()
    activate(Settings.from_environment())
    with pytest.raises(ConfigurationError, match="emulated already"):
        activate(Settings(devices=7))


def test_the_question_is_answered_without_torch_and_without_compiling(tmp_path):
    code = """
import sys
from accelcore_npu_emulator import active
print(active(), "torch" in sys.modules)
"""
    nowhere = {"XDG_CACHE_HOME": str(tmp_path), "CXX": "no-compiler"}
    assert light(code, **nowhere) == ["False", "False"]
    # The NPU's plugin asks the library itself: another one has no answer, and no library is loaded unless it is wanted.
    asks = "from accelcore_npu.detection import emulated_devices; print(emulated_devices())"
    assert light(asks, **nowhere) == ["None"]
    found = bootstrap.environment(Settings(devices=3))
    assert light(asks, **found) == ["3"]
    assert light(asks, **found | {"ACCEL_EMULATE": ""}) == ["None"]
    assert light(asks, **found | {"ACCEL_EMULATED_MEMORY": "much"}) == ["0"]
    # Asked for, but the loader would not find it:
    assert light(code, ACCEL_EMULATE="npu", **nowhere) == ["False", "False"]
    assert light(code, **bootstrap.environment(), **nowhere) == ["True", "False"]
    assert list(tmp_path.iterdir()) == []


def test_another_cann_is_not_taken_for_the_emulator(tmp_path):
    source = tmp_path / "real.cpp"
    source.write_text('extern "C" int aclInit(const char *) { return 0; }')
    library = tmp_path / "libascendcl.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-Wl,-soname,libascendcl.so", "-o", library, source], check=True)
    code = """
import ctypes
from accelcore.errors import BackendUnavailableError
from accelcore_npu.detection import emulated_devices
from accelcore_npu_emulator import activate, active
print(active())
ctypes.CDLL("libascendcl.so")
print(active(), emulated_devices())
try:
    activate()
except BackendUnavailableError as error:
    print("late" if "another libascendcl.so is loaded" in str(error) else error)
"""
    assert light(code, LD_LIBRARY_PATH=str(tmp_path), ACCEL_EMULATE="npu") == ["False", "False", "None", "late"]
    assert light(code, LD_LIBRARY_PATH=str(tmp_path)) == ["False", "False", "None", "late"]


def test_it_is_too_late_once_torch_npu_has_loaded_another_cann(monkeypatch):
    monkeypatch.setattr(native, "opened", lambda load: None)
    with pytest.raises(BackendUnavailableError, match="torch_npu is imported already"):
        activate()


def test_the_environment_for_a_child_says_all_of_it(monkeypatch, tmp_path):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/one:/two")
    monkeypatch.setenv("ACCEL_EMULATED_DEVICES", "3")
    variables = bootstrap.environment()
    folder, *rest = variables["LD_LIBRARY_PATH"].split(":")
    assert rest == ["/one", "/two"]
    assert os.path.exists(os.path.join(folder, "libascendcl.so"))
    assert variables["ACCEL_EMULATE"] == "npu"
    assert variables["ACCEL_EMULATED_DEVICES"] == "3"
    assert variables["TASK_QUEUE_ENABLE"] == "0"
    assert bootstrap.environment(Settings(devices=5))["ACCEL_EMULATED_DEVICES"] == "5"


USERS_TEST = """
def test_addition(emulated_npu):
    import torch
    assert (torch.ones(2, device=emulated_npu) + 1).tolist() == [2, 2]
"""


def test_a_users_own_suite(emulated_process, tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["accelcore_npu_emulator.pytest_plugin"]')
    (tmp_path / "test_it.py").write_text(USERS_TEST)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)],
        env=PLAIN | {"OMP_NUM_THREADS": "1"}, cwd=tmp_path, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "EMULATED npu: 2 x Ascend910B2" in result.stdout
    assert "1 passed" in result.stdout


def test_the_emulation_has_a_device_for_each_rank(monkeypatch):
    monkeypatch.setattr(plugin, "environment", lambda settings: settings.variables())
    monkeypatch.delenv("ACCEL_EMULATED_DEVICES", raising=False)
    for ranks, devices in ((1, "2"), (4, "4")):
        assert plugin.accelcore_emulate(name="npu", devices=ranks)["ACCEL_EMULATED_DEVICES"] == devices
    monkeypatch.setenv("ACCEL_EMULATED_DEVICES", "3")
    assert plugin.accelcore_emulate(name="npu", devices=3)["ACCEL_EMULATED_DEVICES"] == "3"
    with pytest.raises(ConfigurationError, match="less than the 4 ranks need"):
        plugin.accelcore_emulate(name="npu", devices=4)


def test_the_name_of_another_is_left_to_others():
    assert plugin.accelcore_emulate(name="cpu", devices=1) is None


# Libraries that are preloaded, such as those that record what is allocated, stand before CANN's functions.
HOOK = r"""
#include <dlfcn.h>
#include <cstdio>

extern "C" int aclrtMallocAlign32(void **address, size_t size, int policy) {
  auto next = reinterpret_cast<int (*)(void **, size_t, int)>(dlsym(RTLD_NEXT, "aclrtMallocAlign32"));
  puts(next ? "seen" : "nothing comes next");
  fflush(stdout);  // before what Python prints, which has a buffer of its own
  return next ? next(address, size, policy) : -1;
}
"""
# torch_npu comes first, as it may: other scripts of these tests import torch alone, or first.
LOADED = "import torch_npu, torch; print(torch.ones(3, device='npu').sum().item())"


def test_a_preloaded_function_sees_each_call_and_passes_it_on(emulated_process, tmp_path):
    source, hook = tmp_path / "hook.cpp", tmp_path / "hook.so"
    source.write_text(HOOK)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", hook, source, "-ldl"], check=True)
    done = emulated_process("-c", LOADED, LD_PRELOAD=str(hook))
    assert done.stdout.split() == ["seen", "3.0"], done.stderr

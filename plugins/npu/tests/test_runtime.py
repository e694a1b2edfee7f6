from __future__ import annotations

import os

import pytest
import torch
import torch_npu

import accelcore
from accelcore.errors import CheckpointError, UnsupportedError
from accelcore.roles.runtime import AcceleratorRuntime


def test_the_device_is_current_and_its_settings_are_explicit(accel):
    assert torch_npu.npu.current_device() == accel.index == 0
    assert dict(accel.runtime.settings) == {"jit_compile": False, "allow_internal_format": False}
    assert torch_npu.npu.is_jit_compile_false()
    assert torch_npu._C._npu_getOption("ALLOW_INTERNAL_FORMAT").decode() == "disable"


IMPORTED = """
import sys
import torch_npu

torch_npu.npu.set_compile_mode(jit_compile=True)
for name in [name for name in sys.modules if name.partition(".")[0] in ("accelcore", "accelcore_npu")]:
    del sys.modules[name]
import accelcore, accelcore_npu, accelcore_npu.backend

accelcore.installed()
assert not torch_npu.npu.is_jit_compile_false()
accelcore.select("npu")
assert torch_npu.npu.is_jit_compile_false()
"""


def test_importing_the_plugin_changes_no_setting(fork, tmp_path):
    (tmp_path / "script.py").write_text(IMPORTED)
    result = fork(tmp_path / "script.py").finish()
    assert result.returncode == 0, result.stderr


def test_a_random_state_of_another_device_is_named_and_the_hosts_part_is_taken(accel):
    cpu = accelcore.select("cpu")
    assert cpu.runtime.set_rng_state(accel.runtime.rng_state()) == ["npu"]
    assert accel.runtime.set_rng_state(cpu.runtime.rng_state()) == []
    with pytest.raises(CheckpointError, match="npu"):
        accel.runtime.set_rng_state({**accel.runtime.rng_state(), "npu": torch.zeros(3, dtype=torch.uint8)})


def test_running_out_of_memory_is_torchs_own_error(accel):
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * accel.runtime.memory().total, dtype=torch.uint8, device=accel.device)


def test_a_loader_pins_for_this_device_and_its_batches_arrive(accel):
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    loader = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True)
    for (batch,) in loader:
        assert batch.is_pinned()
        assert accel.runtime.to_device(batch).cpu().tolist() == batch.tolist()


def test_loader_workers_are_forked_beside_a_backend_in_use(accel):
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork")
    assert [accel.runtime.to_device(batch)[0].sum().item() for batch in loader] == [6.0, 22.0]


def test_a_whole_step_is_not_captured_because_the_optimizers_count_on_the_host(accel):
    assert not accel.capabilities.graphs
    with pytest.raises(UnsupportedError):
        accel.runtime.capture(lambda: None)


def test_two_recordings_share_the_memory_of_what_they_free(accel):
    runtime = AcceleratorRuntime(accel.device, graph=torch_npu.npu.NPUGraph)
    inputs, total = (torch.zeros(4, device=accel.device) for _ in range(2))
    first, launch_first = runtime.capture(lambda: total.add_(inputs) * 2)
    second, launch_second = runtime.capture(lambda: (inputs * 3).exp().log() + total, beside=launch_first)
    for number, expected in ((1.0, 1.0), (2.0, 3.0)):
        inputs.fill_(number)
        launch_first()
        assert first.tolist() == [2 * expected] * 4
        launch_second()
        assert second.tolist() == pytest.approx([3 * number + expected] * 4)
    assert launch_first.__self__.pool() == launch_second.__self__.pool()


def test_deterministic_makes_torch_and_hccl_so(accel, monkeypatch):
    monkeypatch.setenv("HCCL_DETERMINISTIC", "false")
    accel.runtime.seed(0)
    assert (torch.are_deterministic_algorithms_enabled(), os.environ["HCCL_DETERMINISTIC"]) == (False, "false")
    try:
        accel.runtime.seed(0, deterministic=True)
        assert (torch.are_deterministic_algorithms_enabled(), os.environ["HCCL_DETERMINISTIC"]) == (True, "true")
    finally:
        torch.use_deterministic_algorithms(False)


FORKED = """
import multiprocessing

import torch

import accelcore

accel = accelcore.select("npu")
torch.ones(1, device=accel.device)


actions = {
    "select": lambda: accelcore.select("npu"),
    "to_device": lambda: accel.runtime.to_device(torch.ones(1)),
    "seed": lambda: accel.runtime.seed(1),
    "synchronize": accel.runtime.synchronize,
    "memory": accel.runtime.memory,
    "rng_state": accel.runtime.rng_state,
    "set_rng_state": lambda: accel.runtime.set_rng_state({}),
    "side_stream": accel.runtime.side_stream,
}


def refused(queue):
    for what, action in actions.items():
        try:
            action()
        except accelcore.AccelError as error:
            queue.put((what, type(error).__name__, error.why, error.remedy))
        else:
            queue.put((what, "nothing was raised", "", ""))


context = multiprocessing.get_context("fork")
queue = context.SimpleQueue()
process = context.Process(target=refused, args=(queue,))
process.start()
for _ in actions:
    print(*queue.get(), sep="|")
process.join()
"""


def test_use_after_fork_is_refused_with_what_to_do(fork, tmp_path):
    (tmp_path / "script.py").write_text(FORKED)
    result = fork(tmp_path / "script.py").finish()
    assert result.returncode == 0, result.stderr
    lines = [line.split("|") for line in result.stdout.splitlines() if "|" in line]
    assert len(lines) == 8
    for what, error, why, remedy in lines:
        assert error == "BackendUnavailableError", what
        assert "fork" in why
        assert "spawn" in remedy

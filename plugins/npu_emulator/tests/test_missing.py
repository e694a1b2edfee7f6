"""Operators without a kernel say so; nothing is computed in silence elsewhere."""

import re

import pytest

jobs = pytest.importorskip("kernel_jobs", reason="torch_npu is not installed", exc_type=ImportError)

import torch
import torch_npu

REFUSED = "EMULATED: npu operator {} is not emulated"


def test_an_operator_without_a_kernel_is_an_error(emulated_npu):
    tokens, rows = torch.ones(3, 4, device="npu"), torch.ones(3, 2, dtype=torch.int32, device="npu")
    with pytest.raises(RuntimeError, match=re.escape(REFUSED.format("npu::npu_moe_init_routing"))):
        torch_npu.npu_moe_init_routing(tokens, rows, rows, 3)


def test_it_is_an_error_under_autograd_too(emulated_npu):
    boxes = torch.rand(4, 4, device="npu", requires_grad=True)
    with pytest.raises(RuntimeError, match=re.escape(REFUSED.format("npu::npu_giou"))):
        torch_npu.npu_giou(boxes, boxes)


@pytest.mark.parametrize(
    ("fault", "operation", "name"),
    [
        ("aten::add.Tensor", "add", "aten::add.Tensor"),
        ("aten::add", "add", "aten::add.Tensor"),
        ("aten::linear", "linear", "aten::linear"),
        ("aten::exp", "exp", "aten::exp"),
        ("aten::native_dropout", "dropout", "aten::native_dropout"),
    ],
)
def test_an_injected_fault_takes_an_operator_away(results, fault, operation, name):
    [[error]] = results(jobs.attempts, operation, ACCEL_EMULATED_FAULTS=f"missing@{fault}")
    assert error == REFUSED.format(name)


def test_the_other_operators_stay(results):
    [found] = results(
        jobs.attempts, "linear", "exp", ACCEL_EMULATED_FAULTS="missing@aten::add.Tensor,missing@aten::mul"
    )
    assert found == [6.0, 2.0]


def test_a_fault_that_names_no_operator_is_an_error(outcome):
    [rank] = outcome(jobs.attempts, "exp", ACCEL_EMULATED_FAULTS="missing@aten::exq")
    assert (
        "EMULATED: the host kernels cannot be registered: the fault missing@aten::exq names no operator" in rank.error
    )


PROGRAM = """
import torch, torch_npu
print(torch.digamma(torch.ones(1, device="npu")).item())
print(torch.npu.stop_device(0))  # last: torch_npu refuses the stream afterwards
"""


def test_what_torch_npu_lacks_and_what_stops_nothing_say_so(fork, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = fork(tmp_path / "program.py").finish()
    assert done.returncode == 0, done.stderr
    digamma, stopped = done.stdout.splitlines()[-2:]
    assert float(digamma) == pytest.approx(-0.5772156)
    assert "'aten::digamma.out' is not currently supported on the NPU backend and will fall back" in done.stderr
    assert stopped == "1"
    assert "EMULATED: stopping a device is not emulated" in done.stderr


def _data_parallel():
    if torch.backends.cuda.is_built():
        pytest.skip("DataParallel of torch's CUDA build asks for a GPU first")
    replicas = torch.nn.DataParallel(torch.nn.Linear(2, 2).npu(), device_ids=[0, 1])
    return replicas(torch.ones(4, 2, device="npu"))


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.npu._sleep(10),
        lambda: torch.quantize_per_tensor(torch.ones(2, device="npu"), 0.1, 0, torch.qint8),
        lambda: torch.multiprocessing.reductions.reduce_tensor(torch.ones(2, device="npu")),
        lambda: torch.npu.Event(interprocess=True).ipc_handle(),
        _data_parallel,
    ],
    ids=["sleep", "quantize", "share", "share an event", "DataParallel"],
)
def test_what_is_not_emulated_says_so(emulated_npu, use):
    with pytest.raises(RuntimeError, match="EMULATED"):
        use()


def test_the_search_for_silent_faults_is_refused(results):
    [told] = results(jobs.silent_check, NPU_ASD_ENABLE="2")
    assert REFUSED.format("aclnnSilentCheck") in told


def test_the_check_for_unsafe_memory_is_refused(emulated_npu):
    from torch_npu.npu._recovery import set_npu_tensor_unsafe_check_flag

    x = torch.ones(2, device=emulated_npu)
    set_npu_tensor_unsafe_check_flag(True)
    try:
        with pytest.raises(RuntimeError, match=r"EMULATED: .* memory errors .*aten::add\.Tensor"):
            x + 1
    finally:
        set_npu_tensor_unsafe_check_flag(False)
    assert (x + 1).tolist() == [2.0, 2.0]


PROFILED = """
import sys, warnings, torch, torch_npu
warnings.simplefilter("always")
x = torch.ones(2, device="npu")
for _ in range(2):
    with torch.profiler.profile() as profile:
        x.add_(1)
assert "aten::add_" in {event.name for event in profile.events()}
handler = torch_npu.profiler.tensorboard_trace_handler(sys.argv[1], analyse_flag=False)
with torch_npu.profiler.profile(on_trace_ready=handler):
    torch.ones(2, device="npu").add_(1)
"""


def test_torchs_profiler_sees_the_host_and_says_so_once_and_torch_npus_records_nothing(fork, tmp_path):
    (tmp_path / "profiled.py").write_text(PROFILED)
    done = fork(tmp_path / "profiled.py", tmp_path).finish()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("EMULATED: torch.profiler records the host") == 1
    assert "EMULATED: torch_npu's profiler records nothing" in done.stderr


def test_torch_npus_sync_debug_mode_tells_waits(emulated_npu):
    x = torch.ones(2, device=emulated_npu)
    torch_npu.npu.set_sync_debug_mode("error")
    try:
        for wait in (x.sum().item, x.cpu, x.nonzero):
            with pytest.raises(RuntimeError, match="called a synchronizing NPU operation"):
                wait()
        torch_npu.npu.set_sync_debug_mode("warn")
        with pytest.warns(UserWarning, match="called a synchronizing NPU operation"):
            assert x.sum().item() == 2
    finally:
        torch_npu.npu.set_sync_debug_mode("default")
    assert x.sum().item() == 2

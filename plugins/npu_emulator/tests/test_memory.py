"""Device memory: its limit, its accounting, its poison, the devices that are to be seen."""

import pytest

jobs = pytest.importorskip("memory_jobs", reason="torch_npu is not installed", exc_type=ImportError)

import torch


def test_memory_ends_with_an_error_of_torch_and_comes_back(results):
    [got] = results(jobs.out_of_memory, ACCEL_EMULATED_MEMORY="64MiB")
    assert got["total"] == 64 * 2**20
    assert "NPU out of memory" in got["failed"]
    assert got["other device"] == 1
    assert got["afterwards"] == 1
    assert got["accounted"] == got["reserved"] > 0


def test_memory_in_expandable_segments_has_the_same_limit(results):
    [got] = results(
        jobs.out_of_memory, ACCEL_EMULATED_MEMORY="64MiB", PYTORCH_NPU_ALLOC_CONF="expandable_segments:True"
    )
    assert "NPU out of memory" in got["failed"]
    assert got["other device"] == 1
    assert got["afterwards"] == 1


def test_fresh_memory_is_poisoned(results):
    assert results(jobs.fresh_memory) == [(1 << 20, 1 << 20)]


def test_fresh_memory_without_poison_is_the_hosts(results):
    assert results(jobs.fresh_memory, ACCEL_EMULATED_POISON="0") == [(0, 0)]


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        ("", []),
        ("1", [1]),
        ("0,3", [0, 3]),
        ("3,0", []),  # torch_npu sees none where they do not ascend
        ("2,9,1", [2]),  # as in CANN, what follows an invalid device is ignored
        ("1,1,2", []),
    ],
)
def test_visible_devices_are_numbered_in_the_order_given(results, tmp_path, visible, seen):
    trace = tmp_path / "trace"
    [count] = results(
        jobs.visible_devices,
        ASCEND_RT_VISIBLE_DEVICES=visible,
        ACCEL_EMULATED_DEVICES="4",
        ACCEL_EMULATED_TRACE=str(trace),
    )
    assert count == len(seen)
    if seen:
        assert f"aclrtSetDevice npu:{count - 1} (device {seen[-1]} of the machine)" in trace.read_text()


def test_visible_devices_may_be_named_after_they_were_counted(results, tmp_path):
    trace = tmp_path / "trace"
    variables = {"ACCEL_EMULATED_DEVICES": "4", "ACCEL_EMULATED_TRACE": str(trace)}
    assert results(jobs.visible_devices_said_late, **variables) == [[4, 2]]
    assert "aclrtSetDevice npu:1 (device 3 of the machine)" in trace.read_text()


def test_a_storage_without_memory_is_not_read(emulated_npu):
    x = torch.ones(1 << 16, device=emulated_npu)
    x.untyped_storage().resize_(0)
    for read in (lambda: x + 1, x.cpu, x.sum, lambda: x.copy_(torch.ones(1 << 16))):
        with pytest.raises(RuntimeError, match=r"EMULATED: a tensor .* has no memory"):
            read()
    x.untyped_storage().resize_(4 << 15)
    for read in (lambda: x + 1, x.cpu, lambda: x[1 << 15 :].sum(), lambda: x.expand(3, 1 << 16).sum()):
        with pytest.raises(RuntimeError, match=r"EMULATED: a tensor .* reaches past its memory|out of bounds"):
            read()
    assert x[: 1 << 15].fill_(3).expand(2, 1 << 15).sum().item() == 3 << 16
    x.untyped_storage().resize_(4 << 16)
    assert x.fill_(2).sum().item() == 2 << 16


def test_host_memory_of_no_size_is_not_registered(emulated_npu):
    runtime, memory = torch.npu.npurt(), torch.empty(4096, dtype=torch.uint8)
    pinned = 0x10000000
    assert int(runtime.npuHostRegister(memory.data_ptr(), 4096, pinned)) == 0
    assert int(runtime.npuHostRegister(memory.data_ptr(), 0, pinned)) != 0


def test_a_result_without_room_is_refused_before_the_host_computes_it(results):
    [(told, mebibytes)] = results(jobs.host_memory_of_refusals, ACCEL_EMULATED_MEMORY="64MiB")
    assert set(told.values()) == {"OutOfMemoryError"}, told
    assert mebibytes < 300

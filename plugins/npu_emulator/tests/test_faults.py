"""Injected faults, and the trace that shows what led to them."""

import signal

import pytest

jobs = pytest.importorskip("emulated_jobs", reason="torch_npu is not installed", exc_type=ImportError)

import memory_jobs


def test_the_kth_collective_times_out(results):
    both = results(jobs.sums_until_failure, 3, ranks=2, ACCEL_EMULATED_FAULTS="timeout@2")
    for rank, (done, told) in enumerate(both):
        assert done == 1
        assert told.endswith(
            f"EMULATED: HcclAllReduce (collective 2) on rank {rank} of 2 failed: timed out (an injected fault)"
        )


def test_a_rank_dies_and_the_others_are_told_which_one(outcome):
    survivor, victim, other = outcome(jobs.sums_until_failure, 9, ranks=3, ACCEL_EMULATED_FAULTS="die@1:3")
    assert victim.code == -signal.SIGKILL
    for rank in (survivor, other):
        assert rank.code == 0
        done, told = rank.result
        assert done == 2
        assert "waiting for rank 1 (process" in told


def test_a_fault_that_strikes_no_rank_is_refused(outcome):
    [rank] = outcome(jobs.failure_of_first_use, ACCEL_EMULATED_FAULTS="die@5:1")
    assert "the fault die@5:1 strikes no rank" in rank.result
    assert "the ranks of this job are 0 to 0" in rank.result
    assert "EMULATED" in rank.result


@pytest.mark.parametrize("k", [1, 3])
def test_the_kth_allocation_fails_as_torch_says(results, k):
    size = 32 << 20
    [failed] = results(memory_jobs.allocations, 4, size, ACCEL_EMULATED_FAULTS=f"out_of_memory@{k}")
    assert [number for number, _ in failed] == [k]
    assert "NPU out of memory" in failed[0][1]


def test_processes_share_a_trace(results, tmp_path):
    trace = tmp_path / "trace"
    # Without faults all goes well.
    assert results(jobs.sums_until_failure, 2, ranks=2, ACCEL_EMULATED_TRACE=str(trace)) == [(2, "")] * 2
    lines = trace.read_text().splitlines()
    assert all(line.startswith("EMULATED npu [") and "] " in line for line in lines)
    for rank in (0, 1):
        mine = [line for line in lines if f"HcclAllReduce (collective 2), rank {rank} of 2, 1 elements" in line]
        assert len(mine) == 1
        process = mine[0].partition("]")[0]
        assert any(line.startswith(process) and "launch aten::" in line for line in lines)
        assert any(line.startswith(process) and "aclrtMalloc" in line for line in lines)
    assert trace.stat().st_mode & 0o777 == 0o600

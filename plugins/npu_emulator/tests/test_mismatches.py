"""Ranks that disagree about a collective: a cluster hangs or goes on with wrong numbers, a rehearsal refuses."""

import pytest

jobs = pytest.importorskip("mismatch_jobs", reason="torch_npu is not installed", exc_type=ImportError)


def test_collectives_that_differ_are_refused_on_every_rank(results):
    both = results(jobs.told_of_mismatches, ranks=2, HCCL_EXEC_TIMEOUT="20")
    for rank, (told, total) in enumerate(both):
        assert set(told) == set(jobs.COLLECTIVES)
        for name, (_, _, expected) in jobs.COLLECTIVES.items():
            assert "EMULATED: Hccl" in told[name], (name, told[name])
            assert f"on rank {rank} of 2 failed: the ranks differ (EI0005" in told[name]
            for text in expected:
                assert text in told[name]
        assert total == 2


def test_a_message_that_is_shorter_than_its_place_is_refused_on_both_ranks(results):
    for told in results(jobs.told_of_long_message, ranks=2, HCCL_EXEC_TIMEOUT="20"):
        assert "EMULATED: Hccl" in told
        assert "rank 0: HcclSend of 3 float32 to rank 1; rank 1: HcclRecv of 5 float32 from rank 0" in told


def test_what_hccl_reads_behind_too_few_tensors_is_memory_that_nobody_wrote(results):
    # torch_npu warns that the result is not guaranteed, and has hccl read as much as if there were enough.
    assert [str(got) for got in results(jobs.fewer_tensors_than_ranks, ranks=2)] == ["[2.0, 2.0]", "[nan, nan]"]

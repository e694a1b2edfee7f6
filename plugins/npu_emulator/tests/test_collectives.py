"""HCCL over shared memory, through torch.distributed."""

import os

import pytest

jobs = pytest.importorskip("emulated_jobs", reason="torch_npu is not installed", exc_type=ImportError)

import mismatch_jobs
import sharding_jobs


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.full), 4], ids="{} ranks".format)
def collectives(request, results):
    """What each of the ranks has got."""
    return results(jobs.collectives, ranks=request.param)


def test_every_reduction_of_every_type_that_torch_npu_reduces(collectives):
    assert [got["all_reductions"] for got in collectives] == [[]] * len(collectives)


def test_average_is_the_mean_over_ranks(collectives):
    rows = [jobs.contribution(rank, "float64").tolist() for rank in range(len(collectives))]
    mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    assert [got["average"] for got in collectives] == [mean] * len(collectives)


def test_sums_in_half_precision_are_rounded_to_nearest_even(results):
    import torch

    generator = torch.Generator().manual_seed(0)
    pairs = torch.cat(
        [
            torch.randn(200, 2, generator=generator) * 10.0 ** torch.randint(-9, 5, (200, 2), generator=generator),
            # Ties, subnormals, the largest half, overflow, infinities.
            torch.tensor([[1.0, 2.0**-11], [1 + 2.0**-10, 2.0**-11], [2.0**-24, 2.0**-24], [2.0**-14, -(2.0**-24)]]),
            torch.tensor([[65504.0, 15.0], [65504.0, 16.0], [65504.0, 65504.0], [float("inf"), -1.0]]),
        ]
    )
    both = results(jobs.half_rounding, pairs.tolist(), ranks=2)
    assert both[0] == both[1]
    for dtype, sums in zip((torch.float16, torch.bfloat16), both[0], strict=True):
        exact = pairs.to(dtype).double().sum(1)
        assert torch.equal(torch.tensor(sums, dtype=torch.float64), exact.to(dtype).double())


def test_tensors_that_do_not_fit_into_the_shared_memory_at_once(results):
    assert results(jobs.long_tensor, 3_000_001, ranks=2) == [True, True]


def test_an_average_of_integers_is_cut_off(collectives):
    ranks = len(collectives)
    sums = [value * sum(range(1, ranks + 1)) for value in (1, 4, -3)]
    expected = [int(total / ranks) for total in sums], [int((5 * ranks + sum(range(ranks))) / ranks)]
    assert [got["average_of_integers"] for got in collectives] == [expected] * ranks


def test_what_moves_between_ranks(collectives):
    ranks = len(collectives)
    everyone = range(ranks)
    mine = [[0.0 + 10 * r, 1.0 + 10 * r, 2.0 + 10 * r] for r in everyone]
    sums = sum(r + 1 for r in everyone)
    for rank, got in enumerate(collectives):
        assert got["data_movement"] == {
            "broadcast": mine[1],
            "all_gather": mine,
            "all_gather uneven": [[float(r)] * (r + 1) for r in everyone],
            "reduce_scatter": [2.0 * rank * sums, (2.0 * rank + 1) * sums],
            "reduce_scatter uneven": [float(rank * ranks)] * (rank + 1),
            "all_to_all": [10.0 * r + rank for r in everyone],
            "all_to_all uneven": [float(r) for r in everyone for _ in range(r + 1 if rank == 0 else 1)],
            "gather": mine if rank == 0 else [],
            "scatter": [float(rank)] * 2,
            "reduce": [sum(column) for column in zip(*mine, strict=True)] if rank == 0 else [],
            "objects": [{"rank": r} for r in everyone],
            "empty": [],
        }


def test_messages_between_two_ranks_keep_their_order(collectives):
    assert collectives[0]["messages"] == {}
    for rank, got in enumerate(collectives[1:], 1):
        assert got["messages"] == {"first": [float(rank)] * 3, "second": [-float(rank)] * 3}


def test_coalesced_reductions(collectives):
    total = sum(rank + 1.0 for rank in range(len(collectives)))
    assert [got["coalesced"] for got in collectives] == [[[total] * n for n in (1, 2, 5)]] * len(collectives)


@pytest.mark.parametrize("variables", [{}, {"ROOTINFO_SUBCOMM_ENABLE": "1"}], ids=["rooted", "split"])
def test_groups_work_beside_each_other(results, variables):
    low, high, all_ranks, outermost = 0 + 1, 2 + 3, 0 + 1 + 2 + 3, 0 + 3
    assert results(jobs.subgroups, ranks=4, **variables) == [
        [low, all_ranks, outermost, low],
        [low, all_ranks, low],
        [high, all_ranks, high],
        [high, all_ranks, outermost, high],
    ]


def test_a_captured_graph_may_not_hold_collectives(results):
    [told] = results(jobs.captured_reduction)
    assert "HcclAllReduce within a graph capture is not emulated" in told


def test_double_precision_is_moved_and_not_reduced_as_torch_npu_has_it(results):
    for moved, told in results(jobs.double_precision, ranks=2):
        assert moved == [1 / 3]
        assert "Unsupported data type at::kDouble" in told


def test_a_rank_that_stays_away_is_named_when_the_time_is_up(results):
    told, _ = results(jobs.absent_rank, ranks=2, HCCL_EXEC_TIMEOUT="1")
    assert "EMULATED: HcclAllReduce (collective 2) on rank 0 of 2 failed" in told
    assert told.endswith("waiting for rank 1")


def test_a_message_to_a_rank_that_has_ended_fails(results):
    told, _ = results(jobs.unanswered_messages, ranks=2)
    assert "HcclSend" in told
    assert "waiting for rank 1 (process" in told
    assert told.endswith("has ended)")


def test_no_rank_leaves_anything_in_a_file_system(results, tmp_path):
    before = set(os.listdir("/dev/shm"))
    results(jobs.sums_until_failure, 1, ranks=2, TMPDIR=str(tmp_path))
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "emulated" in name or "npu" in name}
    assert list(tmp_path.iterdir()) == []


# Ranks that disagree about a collective: a cluster hangs or goes on with wrong numbers, a rehearsal refuses.


def test_collectives_that_differ_are_refused_on_every_rank(results):
    both = results(mismatch_jobs.told_of_mismatches, ranks=2, HCCL_EXEC_TIMEOUT="20")
    for rank, (told, total) in enumerate(both):
        assert set(told) == set(mismatch_jobs.COLLECTIVES)
        for name, (_, _, expected) in mismatch_jobs.COLLECTIVES.items():
            assert "EMULATED: Hccl" in told[name], (name, told[name])
            assert f"on rank {rank} of 2 failed: the ranks differ (EI0005" in told[name]
            for text in expected:
                assert text in told[name]
        assert total == 2


def test_a_message_that_is_shorter_than_its_place_is_refused_on_both_ranks(results):
    for told in results(mismatch_jobs.told_of_long_message, ranks=2, HCCL_EXEC_TIMEOUT="20"):
        assert "EMULATED: Hccl" in told
        assert "rank 0: HcclSend of 3 float32 to rank 1; rank 1: HcclRecv of 5 float32 from rank 0" in told


def test_what_hccl_reads_behind_too_few_tensors_is_memory_that_nobody_wrote(results):
    # torch_npu warns that the result is not guaranteed, and has hccl read as much as if there were enough.
    assert [str(got) for got in results(mismatch_jobs.fewer_tensors_than_ranks, ranks=2)] == [
        "[2.0, 2.0]",
        "[nan, nan]",
    ]


# Sharded parameters: the collectives that torch's own code calls, as many as on other devices.


def test_a_sharded_step_calls_the_collectives_that_it_calls_on_the_cpu(results):
    for told in results(sharding_jobs.collectives_of_steps, ranks=2):
        choices = {reshard for _, reshard in told}
        for reshard in choices:
            assert told["npu", reshard] == told["cpu", reshard]
        gathers = {reshard: told["npu", reshard][1].get("c10d._allgather_base_", 0) for reshard in choices}
        assert gathers[True] > gathers[False] == 0
        if None in choices:  # where resharding is asked for, and not left to torch, the root gathers anew, too
            assert gathers[True] == gathers[None] + 1


@pytest.mark.parametrize("ranks", [4, pytest.param(2, marks=pytest.mark.full)])
def test_a_norm_over_a_mesh_is_reduced_as_it_is_on_the_cpu(results, ranks):
    for told, exact in results(sharding_jobs.norm_over_a_mesh_of_two_dimensions, ranks=ranks):
        norm, clipped, reductions = told["npu"]
        assert norm == pytest.approx(exact, rel=1e-6)
        assert clipped == pytest.approx(0.5, rel=1e-5)
        assert reductions == told["cpu"][2] >= ranks // 2


def test_operators_of_divided_tensors_give_what_they_give_of_whole_ones(results):
    for told in results(sharding_jobs.operators_of_divided_tensors, ranks=2):
        for name, (divided, whole) in told.items():
            for found, expected in zip(divided, whole, strict=True):
                assert found == (expected if name == "convolution" else pytest.approx(expected, abs=1e-5)), name

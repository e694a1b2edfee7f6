"""HCCL over shared memory, through torch.distributed."""

import os

import pytest

jobs = pytest.importorskip("emulated_jobs", reason="torch_npu is not installed", exc_type=ImportError)


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

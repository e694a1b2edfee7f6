"""Sharded parameters: the collectives that torch's own code calls, as many as on other devices."""

import pytest

jobs = pytest.importorskip("sharding_jobs", reason="torch_npu is not installed", exc_type=ImportError)


def test_a_sharded_step_calls_the_collectives_that_it_calls_on_the_cpu(results):
    for told in results(jobs.collectives_of_steps, ranks=2):
        choices = {reshard for _, reshard in told}
        for reshard in choices:
            assert told["npu", reshard] == told["cpu", reshard]
        gathers = {reshard: told["npu", reshard][1].get("c10d._allgather_base_", 0) for reshard in choices}
        assert gathers[True] > gathers[False] == 0
        if None in choices:  # where resharding is asked for, and not left to torch, the root gathers anew, too
            assert gathers[True] == gathers[None] + 1


@pytest.mark.parametrize("ranks", [4, pytest.param(2, marks=pytest.mark.full)])
def test_a_norm_over_a_mesh_is_reduced_as_it_is_on_the_cpu(results, ranks):
    for told, exact in results(jobs.norm_over_a_mesh_of_two_dimensions, ranks=ranks):
        norm, clipped, reductions = told["npu"]
        assert norm == pytest.approx(exact, rel=1e-6)
        assert clipped == pytest.approx(0.5, rel=1e-5)
        assert reductions == told["cpu"][2] >= ranks // 2


def test_operators_of_divided_tensors_give_what_they_give_of_whole_ones(results):
    for told in results(jobs.operators_of_divided_tensors, ranks=2):
        for name, (divided, whole) in told.items():
            for found, expected in zip(divided, whole, strict=True):
                assert found == (expected if name == "convolution" else pytest.approx(expected, abs=1e-5)), name

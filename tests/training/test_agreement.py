"""Before the first step the ranks of a job see that they train the same, and say who does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from accelcore.training.agreement import differences
from accelcore.util.text import ranks

SCRIPT = Path(__file__).with_name("agreement_ranks.py")


@pytest.fixture(scope="module")
def found(fork_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("agreement")
    ended = [rank.finish() for rank in fork_ranks(SCRIPT, folder, size=3)]
    assert [rank.returncode for rank in ended] == [0, 0, 0], "\n".join(rank.stderr for rank in ended)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("case", ["nothing", "observers", "no drift", "measures", "wraps"])
def test_ranks_that_train_the_same_are_left_alone(found, case):
    assert [rank[case] for rank in found] == [[], [], []]


@pytest.mark.parametrize(
    ("case", "odd", "says"),
    [
        ("shape", "rank 1", "the parameter 0.weight is (3, 2) float32 on ranks 0 and 2, (4, 2) float32 on rank 1"),
        ("shape", "rank 1", "; and 1 more"),
        ("precision", "rank 2", "the option precision is 'fp32' on ranks 0 and 1, 'bf16' on rank 2"),
        ("policy", "ranks 1 and 2", "the option accumulate is 1 on rank 0, 2 on rank 1, 3 on rank 2"),
        ("frozen", "rank 0", "the parameter 0.bias is (3,) float32, frozen on rank 0, (3,) float32 on ranks 1 and 2"),
        ("rate", "rank 2", "lr in group 0 of the optimizer is 0.1 on ranks 0 and 1, 0.2 on rank 2"),
        ("optimizer", "rank 1", "the optimizer is sgd on ranks 0 and 2, adamw on rank 1"),
        ("loss", "rank 1", "the option loss is function on ranks 0 and 2, None on rank 1"),
        ("schedule", "rank 1", "the option scheduler is 'linear' on ranks 0 and 2, 'cosine' on rank 1"),
        ("version", "rank 0", "torch is 2.0.0 on rank 0, "),
    ],
)
def test_every_rank_is_told_which_is_odd_and_in_what(found, case, odd, says):
    for rank in found:
        kind, what, why, untouched = rank[case]
        assert kind == "DistributedError"
        assert what == f"{odd} of this job would not train what the others train"
        assert says in why
        assert untouched, "the model was changed before the ranks agreed"


@pytest.mark.parametrize(
    ("case", "says", "steps"),
    [
        ("ddp", "the norm of the parameter weight is ", 2),
        ("combine_ddp", "lr in group 0 of the optimizer is 0.1 on ranks 0 and 2, 0.01 on rank 1", 2),
        ("fsdp", "lr in group 0 of the optimizer is 0.1 on ranks 0 and 2, 0.01 on rank 1", 2),
        ("save", "the norm of the parameter weight is ", 1),
    ],
)
def test_ranks_that_drift_apart_are_told_within_some_steps_and_in_save(found, case, says, steps):
    for rank in found:
        what, why, done = rank[case]
        assert what == "the training on rank 1 of this job differs from that on the other ranks"
        assert says in why
        assert done <= steps


def test_an_optimizer_that_measures_over_all_parameters_is_refused_under_zero1(found):
    for rank in found:
        what, why, done = rank["zero1"]
        assert "differs" in what
        assert "distance in group 0 of the optimizer is " in why
        assert done == 1


def test_gradients_of_two_forward_passes_add_up_under_ddp(found):
    """DistributedDataParallel moves the first ones into a bucket meanwhile: they are not cleared."""
    for rank in found:
        ddp, combine_ddp = map(torch.tensor, rank["twice"])
        torch.testing.assert_close(ddp, combine_ddp)
        assert rank["twice"] == found[0]["twice"]


def test_what_one_rank_is_refused_no_rank_does(found):
    kinds = [rank["refused"][0] for rank in found]
    assert kinds == ["DistributedError", "UnsupportedError", "DistributedError"]
    assert found[0]["refused"][1] == "another rank could not prepare this training"


def test_statistics_over_ranks_are_refused_where_the_device_has_no_kernels_for_them(found):
    for rank in found:
        for kind, what, why, untouched in rank["statistics"]:
            assert kind == "UnsupportedError"
            assert "'1' is a SyncBatchNorm" in what
            assert "sync_batchnorm" in why
            assert untouched
        of_torchs_wrapper, of_zero1 = rank["frozen statistics"]
        assert of_torchs_wrapper[0] == "UnsupportedError"
        assert not of_zero1


def test_an_optimizer_that_divides_the_parameters_itself_is_refused(found):
    for rank in found:
        what, remedy = rank["redundant"]
        assert "ZeroRedundancyOptimizer" in what
        assert "zero1" in remedy


def test_the_most_common_is_taken_for_right_and_rank_0_where_opinion_is_divided():
    assert differences([{"a": "1"}, {"a": "2"}])[0] == "rank 1"
    assert differences([{"a": "1"}, {"a": "2"}, {"a": "2"}])[0] == "rank 0"
    odd, why = differences([{"a": "1"}, {"a": "2", "b": "3"}, {"a": "2"}, {"a": "1"}])
    assert odd == "ranks 1 and 2"
    assert why == "a is 1 on ranks 0 and 3, 2 on ranks 1 and 2; b is nothing on ranks 0, 2 and 3, 3 on rank 1"
    assert [ranks({3}), ranks([2, 0]), ranks([4, 1, 0])] == ["rank 3", "ranks 0 and 2", "ranks 0, 1 and 4"]

"""Two ranks: the same scripts in torch's DistributedDataParallel, and with combine_ddp in no wrapper at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import rewritten
import torch

COMBINED = ("--combine-ddp",)
EXACT = [("train_resnet.py",), ("pretrain_bert.py",)]
DYNAMIC = ("--loss-scale", "dynamic")
RUNS = [
    ("train_resnet.py", "--amp", "--opt-level", "O1", *DYNAMIC, *COMBINED),
    ("train_resnet.py", "--amp", "--opt-level", "O2", *DYNAMIC),
    ("train_resnet.py", "--amp", "--opt-level", "O3"),
    ("pretrain_bert.py", "--amp", "--opt-level", "O1", "--loss-scale", "128.0", "--combine-grad"),
    ("pretrain_bert.py", "--amp", "--opt-level", "O1", *DYNAMIC, "--two-losses", *COMBINED),
    ("pretrain_bert.py", "--amp", "--opt-level", "O2", "--loss-scale", "128.0", *COMBINED),
]


@pytest.fixture(scope="module")
def ranks(fork_ranks, tmp_path_factory):
    """What each rank found, by run."""
    folder = tmp_path_factory.mktemp("ranks")
    ended = [each.finish() for each in fork_ranks(rewritten.__file__, folder, json.dumps(EXACT + RUNS))]
    assert [each.returncode for each in ended] == [0, 0], "\n".join(each.stderr for each in ended)
    found = [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(2)]
    return dict(zip(EXACT + RUNS, zip(*found, strict=True), strict=True))


def close(found, expected, tolerance):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("run", RUNS, ids=" ".join)
def test_two_ranks_train_as_in_fp32_without_apex(ranks, run):
    for found, exact in zip(ranks[run], ranks[run[:1]], strict=True):
        if "--combine-ddp" in run and run[0] == "train_resnet.py":
            found["top1"] = exact["top1"]  # BatchNorm's statistics are those of rank 0 there
        close(found["losses"], exact["losses"], 6e-3)
        assert found.get("top1") == exact.get("top1")


@pytest.mark.parametrize("run", RUNS, ids=" ".join)
def test_ranks_end_with_the_same_parameters(ranks, run):
    first, second = (each["state"] for each in ranks[run])
    for name in first:
        if "running" not in name or "--combine-ddp" in run:  # torch's wrapper was told to leave buffers alone
            assert first[name] == second[name], name


def test_two_ranks_are_one_with_all_the_data(ranks):
    """LayerNorm looks at each example by itself, and so the mean over ranks is that over the batch."""
    alone = rewritten.run("pretrain_bert.py")
    for run in RUNS:
        if run[0] == "pretrain_bert.py":
            both = torch.tensor([each["losses"] for each in ranks[run]]).mean(0)
            close(both.tolist(), alone["losses"], 6e-3)
            close(ranks[run][0]["norms"], alone["norms"], 6e-3)


def ranks_of(program, fork_ranks, folder):
    """What each rank of a program found."""
    ended = [each.finish() for each in fork_ranks(Path(rewritten.__file__).with_name(program), folder)]
    assert [each.returncode for each in ended] == [0, 0], "\n".join(each.stderr for each in ended)
    return [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def disagreeing(fork_ranks, tmp_path_factory):
    return ranks_of("disagreeing.py", fork_ranks, tmp_path_factory.mktemp("disagreeing"))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_ranks_that_begin_apart_use_other_parameters_and_overflow_alone_stay_together(disagreeing, level):
    first, second = disagreeing
    for key in first:
        if key.startswith(level):
            assert first[key] == second[key], key
    begin, *steps = (torch.tensor(first[f"{level} {when}"][:2]) for when in ("begin", "step 0", "step 1", "step 2"))
    assert torch.equal(steps[0], begin)  # rank 1 overflowed
    assert first[f"{level} scale"] == 32.0
    # lr 0.5 of the mean over two ranks; in step 1 each used another parameter, rank 1 with twice the loss.
    x = torch.tensor([1.0, 2.0])
    expected = begin - torch.stack([0.25 * x, 0.5 * x])
    torch.testing.assert_close(steps[1], expected, rtol=0, atol=2e-3)
    torch.testing.assert_close(steps[2], expected - torch.stack([0.75 * x, 0 * x]), rtol=0, atol=2e-3)
    assert first[f"{level} buffer"] == 2.0  # of rank 0


def test_an_optimizer_whose_combine_ddp_is_set_to_false_keeps_its_own_gradients(disagreeing):
    assert [each["left out"] for each in disagreeing] == [[1.0, 2.0], [2.0, 4.0]]


@pytest.fixture(scope="module")
def wrapped(fork_ranks, tmp_path_factory):
    return ranks_of("wrapped.py", fork_ranks, tmp_path_factory.mktemp("wrapped"))


def test_the_wrapper_of_apex_leaves_each_rank_its_buffers(wrapped):
    """The means of batches [[1, 2], [3, 4]] and twice that; vectors of spectral_norm by another seed on each rank."""
    assert [each["mean"] for each in wrapped] == [[2.0, 3.0], [4.0, 6.0]]
    assert [each["kept"] for each in wrapped] == [True, True]
    assert wrapped[0]["weight"] == wrapped[1]["weight"]
    assert wrapped[0]["gradient"] == wrapped[1]["gradient"]
    assert [each["warnings"] for each in wrapped] == [[], []]


def test_one_rank_alone_can_evaluate_in_the_wrapper_of_apex(wrapped):
    assert wrapped[0]["evaluated"] == wrapped[0]["directly"]

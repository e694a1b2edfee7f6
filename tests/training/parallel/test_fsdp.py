"""Models that the ranks divide among themselves, against loops written by hand with torch's own engines."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.training.parallel.fsdp_models import BASIC, LR, STEPS, Momentum, batch_of, loss_of, made

RANKS = Path(__file__).with_name("fsdp_ranks.py")
MODELS = ("transformer", "convolutions", "partly")
WAYS = ("ours", "torch", "fused", "fsdp", "zero2", "zero3", "offloaded")
# What differs where ranks are many is how tensors are cut, which is the same in every way and of every model.
OF = {2: WAYS, 4: ("ours",)}
TRAINED = [*((2, name) for name in MODELS), (4, "transformer")]


@pytest.fixture(scope="module")
def job_of(fork_ranks, tmp_path_factory):
    """What each rank of a job of a size found."""

    @cache
    def found(size, ways):
        folder = tmp_path_factory.mktemp("job")
        ended = [rank.finish(300) for rank in fork_ranks(RANKS, folder, *ways, size=size)]
        assert [rank.returncode for rank in ended] == [0] * size, "\n".join(rank.stderr for rank in ended)
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]

    return found


@pytest.fixture(params=[2, 4])
def job(request, job_of):
    """Jobs of two, and of four, which trains one model in one way."""
    return job_of(request.param, OF[request.param])


@pytest.fixture
def pair(job_of):
    """A job of two."""
    return job_of(2, WAYS)


def close(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.mark.parametrize(("size", "name"), TRAINED)
def test_the_weights_are_those_of_the_loop_by_hand(job_of, size, name):
    equal_by_hand(job_of(size, OF[size]), name, OF[size])


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_the_weights_are_those_of_the_loop_by_hand_on_four_ranks_in_every_way(job_of, name):
    equal_by_hand(job_of(4, WAYS), name, WAYS)


def equal_by_hand(job, name, ways):
    for rank in job:
        found = rank["equal"][name]
        moved = [key for key, value in found["start"].items() if not torch.equal(value, found["ours"][key])]
        assert len(moved) >= len(found["start"]) // 2, "it trained nothing"
        # Without statistics of a batch every way gives one result; those of rank 0 are everybody's here, not by hand.
        expected = {key: value for key, value in found["by hand"].items() if "running" not in key}
        for way in ways if name == "transformer" else [way for way in ways if way in BASIC]:
            weights = {key: value for key, value in found[way].items() if "running" not in key}
            close(weights, expected, rtol=1e-5, atol=1e-6)
            assert all(torch.equal(value, job[0]["equal"][name][way][key]) for key, value in found[way].items())


@pytest.mark.parametrize(("size", "name"), TRAINED)
def test_the_weights_are_those_of_ddp(job_of, size, name):
    job = job_of(size, OF[size])
    for rank in job:
        found = rank["equal"][name]
        expected = {key: value for key, value in found["replicated"].items() if "running" not in key}
        weights = {key: value for key, value in found["ours"].items() if "running" not in key}
        close(weights, expected, rtol=1e-4, atol=1e-5)
    first = job[0]["equal"][name]
    close(first["ours"], first["replicated"], rtol=1e-4, atol=1e-5)


def test_a_part_that_nobody_uses_is_not_decayed_and_a_frozen_one_stays(pair):
    found = pair[0]["equal"]["partly"]
    for key in ("unused.weight", "frozen.weight"):
        assert torch.equal(found["ours"][key], found["start"][key])


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ("accumulated", "accumulated by hand"),
        ("accumulated torch", "accumulated by hand"),
        ("scaled", "accumulated by hand"),
        ("compiled partly", "partly by hand"),
        ("bf16", "bf16 by hand"),
        ("autocast", "autocast ddp"),
        ("O1", "O1 ddp"),
        ("O2", "O2 ddp"),
        *((f"anew {parallel}", "plain by hand") for parallel in ("ddp", "combine_ddp", "fsdp", "zero2")),
    ],
)
def test_options_mean_what_they_mean_elsewhere(pair, ours, expected):
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if "hand" in expected else {"rtol": 2e-2, "atol": 2e-2}
    for rank in pair:
        close(rank["options"][ours], rank["options"][expected], **tolerance)


def test_shards_of_a_model_in_low_precision_are_its_masters(pair):
    assert pair[0]["options"]["given in bf16"] == {"torch.float32"}


def test_groups_are_what_was_chosen_and_a_tied_weight_stays_with_the_model(job):
    found = job[0]["groups"]
    blocks = [f"blocks.{number}" for number in range(3)]
    assert found["list"] == ["", *blocks]
    assert found["type"] == ["", *(f"{block}.norm" for block in blocks)]
    assert found["function"] == found["tied"] == ["", *blocks]


def test_each_rank_holds_its_share_and_trains_plain_tensors(job):
    whole = job[0]["groups"]["elements"][0]
    own = [rank["groups"]["elements"][1] for rank in job]
    assert sum(own) == whole
    assert max(own) < 2 * whole / len(job)
    for rank in job:
        assert set(rank["groups"]["kinds"]) == {"DTensor"}, "an evaluation left something gathered"
        assert torch.equal(rank["groups"]["evaluated"], job[0]["groups"]["evaluated"])
        assert rank["groups"]["moment"][0] == (13, 6)
        assert rank["groups"]["moment"][1] != (13, 6)
        assert rank["groups"]["route"] in ("native", "fused")


def test_an_evaluation_in_which_a_rank_would_wait_for_others_raises_on_all(job):
    for rank in job:
        assert "same number of batches" in rank["groups"]["uneven"]


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("flat", "each rank has shards"),
        ("graph", "graph"),
        ("clip", "only this rank's shards"),
        ("lamb", 'use parallel="zero1"'),
        ("bertadam", "it needs whole parameters"),
        ("third party", "it needs whole parameters"),
        ("offload", "cpu_offload=True cannot be combined"),
        ("wrap", "LayerNorm"),
        ("scalar", "'scale' cannot be divided among ranks: it is a scalar"),
        ("empty", "'none' cannot be divided among ranks: it is empty"),
        ("complex", "'wave' cannot be divided among ranks: it is complex"),
        ("dtypes", "several dtypes"),
        ("sparse", "sparse"),
        ("comm_dtype", "'int8'"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_changed(pair, case, says):
    for rank in pair:
        assert says in rank["refused"][case]
        assert rank["refused"][f"{case} unchanged"]


def test_state_that_the_optimizer_had_goes_on(pair):
    for rank in pair:
        close(rank["again"]["ours"], rank["again"]["torch"], rtol=1e-5, atol=1e-6)
        assert rank["again"]["shown"].startswith("<Trainer of Partly by ")
        first, second = rank["again"]["torch"], rank["again"]["second"]
        assert not all(torch.equal(second[key], value) for key, value in first.items())
        close(rank["again"]["own"], rank["again"]["theirs"], rtol=1e-6, atol=1e-7)


def test_state_that_the_optimizer_had_is_that_of_a_loop_on_one_process(pair):
    model = made("partly")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3)
    loss_of(model, batch_of("partly", 0, 0)).backward()
    optimizer.step()
    for number in range(STEPS):
        optimizer.zero_grad()
        for rank in range(len(pair)):
            (loss_of(model, batch_of("partly", rank, number)) / len(pair)).backward()
        optimizer.step()
    expected = {name: value.double() for name, value in model.state_dict().items()}
    close(pair[0]["again"]["ours"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["data", "in place"])
def test_a_forward_pass_that_writes_to_a_parameter_is_refused(pair, way):
    for rank in pair:
        assert "'slow.weight'" in rank["written"][way]
        assert "after a step" in rank["written"][way]


def test_a_script_may_write_to_shards_after_a_step(pair):
    torch.manual_seed(0)
    model = Momentum()
    optimizer = torch.optim.SGD(model.trained.parameters(), lr=LR)
    for _ in range(3):
        model(torch.ones(2, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.follow()
    expected = [{name: value.double() for name, value in part.state_dict().items()} for part in model.children()]
    for rank in pair:
        for found, by_hand in zip(rank["written"][None], expected, strict=True):
            close(found, by_hand, rtol=1e-6, atol=1e-7)

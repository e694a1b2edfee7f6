"""Optimizer state that ranks divide, against DistributedDataParallel by hand."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from accelcore.testing.support.options import NINE

RANKS = Path(__file__).with_name("zero1_ranks.py")
WAYS = ("tensors", "flat", "torch", "torch, flat")


@pytest.fixture(scope="module")
def job_of(fork_ranks, tmp_path_factory):
    """What each rank of a job of a size found."""

    @cache
    def found(size):
        folder = tmp_path_factory.mktemp("job")
        ended = [rank.finish(300) for rank in fork_ranks(RANKS, folder, size=size)]
        assert [rank.returncode for rank in ended] == [0] * size, "\n".join(rank.stderr for rank in ended)
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]

    return found


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.full)])  # test_fsdp.py has four ranks in every run
def job(request, job_of):
    """Jobs of two and of four."""
    return job_of(request.param)


@pytest.fixture
def pair(job_of):
    """A job of two."""
    return job_of(2)


def close(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.mark.parametrize("name", ["transformer", "convolutions", "partly"])
def test_the_weights_are_those_of_ddp_by_hand(job, name):
    for rank in job:
        found = rank["equal"][name]
        expected = {key: value for key, value in found["by hand"].items() if "running" not in key}
        for way in WAYS:
            close(
                {key: value for key, value in found[way].items() if "running" not in key},
                expected,
                rtol=1e-5,
                atol=1e-6,
            )
            assert all(torch.equal(value, job[0]["equal"][name][way][key]) for key, value in found[way].items())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["transformer", "convolutions", "partly"])
def test_each_state_is_held_by_one_rank(job, name, way):
    held = [rank["equal"][name][f"{way} held"] for rank in job]
    whole = job[0]["equal"][name]["held by all"]
    assert sorted(owned for rank in held for owned in rank["names"]) == whole["names"]
    assert sum(rank["elements"] for rank in held) == whole["elements"]
    assert max(rank["elements"] for rank in held) < 0.8 * whole["elements"]


@pytest.mark.parametrize("name", NINE)
def test_every_optimizer_updates_as_with_ddp(pair, name):
    for rank in pair:
        for flat in (False, None):
            # Some divide by the root of a gradient that is near 0, and so by what rounding made of it.
            close(rank["nine"][name, "zero1", flat], rank["nine"][name, "ddp", flat], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", ["accumulated", "scaled", "function", "masters", "masters, flat"])
def test_options_mean_what_they_mean_elsewhere(pair, case):
    for rank in pair:
        close(rank["options"][case, "zero1"], rank["options"][case, "combine_ddp"], rtol=1e-5, atol=1e-6)


def test_what_is_frozen_or_unfrozen_keeps_its_owner(pair):
    for rank in pair:
        close(rank["frozen"]["zero1"], rank["frozen"]["combine_ddp"], rtol=1e-5, atol=1e-6)


def test_the_state_of_what_is_frozen_is_saved_and_resumed(pair):
    before, after = (sorted(name for rank in pair for name in rank["kept"][when]) for when in (0, 1))
    assert before == after
    assert "blocks.0.inner.weight" in before


def test_an_optimizer_that_clips_by_the_norm_of_many_gradients_is_refused(pair):
    for rank in pair:
        assert "lamb cannot clip by use_global_grad_norm" in rank["refused"]["lamb"]
        assert "bertadam cannot clip by max_grad_norm" in rank["refused"]["bertadam"]
        assert all("clip_norm=..." in says for says in rank["refused"].values())

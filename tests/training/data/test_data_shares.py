"""Data that ranks divide among themselves: no row is lost, and none comes twice but to fill up."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

import accelcore

RANKS = Path(__file__).with_name("data_ranks.py")


@pytest.fixture(scope="module")
def job(fork_ranks, tmp_path_factory):
    """What each of three ranks found."""
    folder = tmp_path_factory.mktemp("data")
    ended = [rank.finish() for rank in fork_ranks(RANKS, folder, size=3)]
    assert [rank.returncode for rank in ended] == [0] * 3, "\n".join(rank.stderr for rank in ended)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


def counted(job, name, epoch=0):
    """How often each row came, over all ranks."""
    return Counter(chain.from_iterable(rank["shares"][name]["epochs"][epoch] for rank in job))


@pytest.mark.parametrize(
    ("name", "rows", "most"),
    [
        ("uneven", 20, 1),  # to fill up: a row
        ("stream", 14, 4),  # two batches of two
        ("short stream", 3, 2),
        ("list", 7, 2),
        ("sharded", 14, 1),
        ("sharded by hand", 14, 1),
    ],
)
def test_every_row_comes_and_few_twice_to_fill_up(job, name, rows, most):
    for epoch in (0, 1):
        found = counted(job, name, epoch)
        assert found.keys() == set(range(rows)), "rows were lost"
        assert found.total() <= rows + most
    assert len({rank["shares"][name]["batches"] for rank in job}) == 1, "a rank would wait for others in the loop"


@pytest.mark.parametrize(
    ("name", "rows", "least"),
    [("uneven, dropping", 20, 12), ("stream, dropping", 14, 12), ("sharded, dropping", 14, 12)],
)
def test_where_the_loader_drops_what_is_left_over_nothing_comes_twice(job, name, rows, least):
    found = counted(job, name)
    assert found.keys() <= set(range(rows))
    assert set(found.values()) == {1}
    assert len(found) >= least
    assert len({rank["shares"][name]["batches"] for rank in job}) == 1


def test_the_length_is_what_an_epoch_yields(job):
    for rank in job:
        for name, share in rank["shares"].items():
            if name not in ("evaluated", "weighted", "whole"):
                assert share["length"] in (share["batches"], None), name


@pytest.mark.parametrize(
    ("name", "rows"), [("uneven", 20), ("stream", 14), ("list", 7), ("sharded", 14), ("sharded, dropping", 12)]
)
def test_an_evaluation_has_every_row_once(job, name, rows):
    found = Counter(chain.from_iterable(rank["shares"]["evaluated"][name] for rank in job))
    assert set(found.values()) == {1}
    assert len(found) >= rows


def test_a_loader_that_is_not_to_be_divided_is_read_whole(job):
    assert [rank["shares"]["whole"] for rank in job] == [list(range(14))] * 3


def test_an_epoch_is_told_to_what_wants_to_know_it(job):
    for rank, found in enumerate(job):
        assert found["told"] == [0, 1]
        assert found["files"] == [[rank, 3]] * 2
        first, second = found["shares"]["sharded"]["epochs"]
        assert first != second


def test_what_cannot_be_divided_is_refused(job):
    for rank, found in enumerate(job):
        for own, named in (
            ("class", "Own is a class"),
            ("sampler", "sampler is a list"),
            ("batch_sampler", "batch_sampler is a list"),
            ("no batches", "batch_size=None"),
        ):
            assert named in found["refused"][own]
            assert "sampler=DistributedSampler(" in found["refused"][own]
            assert "shard=False" in found["refused"][own]
        assert f"rank 0 of 1, and this is rank {rank} of 3" in found["refused"]["other place"]
        assert f"rank 0 of 2, and this is rank {rank} of 3" in found["refused"]["other stream"]
        for name, own, rank_0s in (("rows", "12 rows, 2 ", "8 rows, 2 "), ("size", "8 rows, 1 ", "8 rows, 2 ")):
            says = f"the loader of rank 1 has {own}batches for each rank, and that of rank 0 has {rank_0s}batches"
            assert (says if rank == 1 else "not refused") in found["refused"][name]
        assert found["refused"]["own rows"] == "not refused"


def test_a_weighted_sampler_draws_on_each_rank_as_its_error_says(job):
    for found in job:
        error = found["refused"]["weighted"]
        assert "sampler is a WeightedRandomSampler" in error
        assert "sampler=DistributedSampler(" not in error  # it would drop the weights
        for part in ("num_samples // job.world_size", "manual_seed(job.rank)", "shard=False"):
            assert part in error
    rows = [found["shares"]["weighted"] for found in job]
    assert [len(each) for each in rows] == [12] * 3
    assert len({tuple(each) for each in rows}) == 3
    assert all(row >= 50 for each in rows for row in each)


def test_a_schedule_for_the_batches_of_all_ranks_is_reported(job):
    assert [[line.startswith("CosineAnnealingLR seems") for line in rank["schedule"]] for rank in job] == [
        [True],
        [],
        [],
    ]
    assert "8 updates" in job[0]["schedule"][0]


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_workers_of_ranks_that_are_seeded_alike_draw_numbers_of_their_own(job, whose):
    rows = list(chain.from_iterable(rank["drawn"][whose]["rows"] for rank in job))
    assert sorted(rows) == list(range(12))
    for library in range(3):
        numbers = [number for rank in job for number in rank["drawn"][whose]["numbers"][library]]
        assert len(set(numbers)) == 12
    assert job[0]["drawn"]["seed"] == 3, "a sampler of the user's has the seed it was given"


def test_rank_0_has_workers_as_torch_seeds_them(job):
    from tests.training.data.data_ranks import Drawn

    torch.manual_seed(6)
    alone = DataLoader(Drawn(), 2, num_workers=2, sampler=range(0, 12, 3))
    assert torch.cat([batch[1] for batch in alone]).tolist() == job[0]["drawn"]["ours"]["numbers"][0]


class Numbers(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


@given(count=st.integers(0, 40), world_size=st.integers(1, 5), last=st.sampled_from(["repeat", "drop", "uneven"]))
def test_a_sharded_stream_divides_any_number_of_rows(count, world_size, last):
    streams = [
        accelcore.ShardedStream(Numbers(count), rank=rank, world_size=world_size, last=last)
        for rank in range(world_size)
    ]
    shares = [list(stream) for stream in streams]
    lengths = list(map(len, shares))
    found = Counter(chain.from_iterable(shares))
    whole, left = divmod(count, world_size)
    if last == "uneven":
        assert found == Counter(range(count))
        assert max(lengths) - min(lengths) <= 1
    elif last == "drop":
        assert found == Counter(range(whole * world_size))
        assert set(lengths) == {whole}
    else:
        assert found.keys() == set(range(count))
        assert set(lengths) == {whole + bool(left)}


def test_a_sharded_stream_has_a_place():
    with pytest.raises(accelcore.ConfigurationError, match=r"rank=2 .*world_size=2.*\n.*job\.rank"):
        accelcore.ShardedStream(Numbers(3), rank=2, world_size=2)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_alone_the_workers_of_a_sharded_stream_divide_it(accel, workers, caplog):
    model = torch.nn.Linear(1, 1)
    trainer = accel.trainer(model, accel.optimizers.create("sgd", model.parameters()))
    loader = DataLoader(accelcore.ShardedStream(Numbers(10)), 2, num_workers=workers)
    assert sorted(row for batch in trainer.batches(loader) for row in batch.tolist()) == list(range(10))
    assert [line for line in caplog.messages if "without a step" not in line] == []

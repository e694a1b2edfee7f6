"""The gallery's scripts train on the emulated NPU as their twins in plain torch do on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "gallery"))
import runs
import twins


@pytest.fixture(scope="module")
def ranks(fork_ranks, tmp_path_factory):
    """What the scripts return on each of two emulated NPUs, and their twins on the CPU beside."""
    folder = tmp_path_factory.mktemp("ranks")
    npu = fork_ranks(runs.__file__, folder / "npu", "ours", "synced", ACCEL_DEVICE="npu")
    cpu = fork_ranks(runs.__file__, folder / "cpu", "twins", ACCEL_DEVICE="cpu")
    ended = [rank.finish() for rank in (*npu, *cpu)]
    assert not any(rank.returncode for rank in ended), "\n".join(rank.stderr for rank in ended)
    found = {device: [json.loads((folder / device / f"rank-{rank}.json").read_text()) for rank in range(2)]
             for device in ("npu", "cpu")}  # fmt: skip
    return [{**npu, **cpu} for npu, cpu in zip(found["npu"], found["cpu"], strict=True)]


def assert_alike(found, exact):
    for mine, theirs in zip(found, exact, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-6)


@pytest.mark.parametrize("name", twins.NAMES)
def test_alone_it_gives_the_cpus_losses(name, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCEL_DEVICE", "npu")
    assert_alike(runs.run("ours", name, tmp_path), runs.run("twins", name, tmp_path))


@pytest.mark.parametrize("name", twins.NAMES)
def test_two_ranks_give_the_cpus_losses(name, ranks):
    for found in ranks:
        assert_alike(found["ours"][name], found["twins"][name])


def test_batchnorm_over_ranks_gives_the_losses_of_the_whole_batch(ranks, tmp_path):
    exact = runs.run("twins", "imagenet", tmp_path, "--sync-batchnorm")
    assert_alike(ranks[0]["synced"], exact)
    with pytest.raises(AssertionError):
        assert_alike(ranks[0]["ours"]["imagenet"], exact)

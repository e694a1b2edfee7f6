"""The gallery's scripts train on the emulated NPU as their twins in plain torch do on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "gallery"))
import runs
import twins


def assert_alike(found, exact):
    for mine, theirs in zip(found, exact, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-6)


@pytest.mark.parametrize("name", twins.NAMES)
def test_alone_it_gives_the_cpus_losses(name, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCEL_DEVICE", "npu")
    assert_alike(runs.run("ours", name, tmp_path), runs.run("twins", name, tmp_path))


def test_two_ranks_give_the_cpus_losses_and_batchnorm_over_them_those_of_the_whole_batch(fork_ranks, tmp_path):
    npu, cpu = tmp_path / "npu", tmp_path / "cpu"
    started = [
        *fork_ranks(runs.__file__, npu, "ours", "synced", ACCEL_DEVICE="npu"),
        *fork_ranks(runs.__file__, cpu, "twins", ACCEL_DEVICE="cpu"),
    ]
    ended = [rank.finish() for rank in started]
    assert not any(rank.returncode for rank in ended), "\n".join(rank.stderr for rank in ended)
    found, exact = (json.loads((folder / "rank-0.json").read_text()) for folder in (npu, cpu))
    for name in twins.NAMES:
        assert_alike(found["ours"][name], exact["twins"][name])
    whole = runs.run("twins", "imagenet", tmp_path, "--sync-batchnorm")
    assert_alike(found["synced"], whole)
    assert abs(found["synced"][-1][0] - found["ours"]["imagenet"][-1][0]) > 1e-3  # of each rank's rows, they are others

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


@pytest.mark.full  # in every run, test_shards.py has statistics over two ranks
def test_batchnorm_over_two_ranks_gives_the_losses_of_the_whole_batch_on_the_cpu(fork_ranks, tmp_path):
    ended = [rank.finish() for rank in fork_ranks(runs.__file__, tmp_path, "synced", ACCEL_DEVICE="npu")]
    assert not any(rank.returncode for rank in ended), "\n".join(rank.stderr for rank in ended)
    found = json.loads((tmp_path / "rank-0.json").read_text())["synced"]
    assert_alike(found, runs.run("twins", "imagenet", tmp_path, "--sync-batchnorm"))

"""How long hccl waits for other ranks, as the user says it, and what it then says of them."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch.distributed as dist

from accelcore.errors import ConfigurationError, DistributedError


@pytest.fixture
def alone(accel, tmp_path, monkeypatch):
    """Forms a job of one rank."""
    monkeypatch.delenv("HCCL_EXEC_TIMEOUT", raising=False)
    return lambda **options: accel.distributed(
        rank=0, world_size=1, init_method=f"file://{tmp_path}/{len(list(tmp_path.iterdir()))}", **options
    )


def test_the_timeout_reaches_hccl_in_whole_seconds_for_the_length_of_a_job(accel, alone):
    # The largest whole number below, so that hccl, which names the rank that is missing, is the first to end the wait.
    for timeout, seconds in (
        (timedelta(minutes=2), "119"),
        (timedelta(seconds=2.5), "2"),
        (timedelta(seconds=0.3), "1"),
    ):
        with alone(timeout=timeout):
            assert os.environ["HCCL_EXEC_TIMEOUT"] == seconds
            with accel.distributed(timeout=timedelta(hours=1)):
                pass
            with pytest.raises(DistributedError), accel.distributed(rank=1, world_size=2):
                pass
            assert os.environ["HCCL_EXEC_TIMEOUT"] == seconds, "the job that stands is not another"
        assert "HCCL_EXEC_TIMEOUT" not in os.environ
    with alone():
        assert "HCCL_EXEC_TIMEOUT" not in os.environ


def test_a_users_own_setting_wins_and_says_so(alone, monkeypatch, caplog):
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", "90")
    with alone(timeout=timedelta(seconds=90)):
        assert not caplog.messages
    with alone(timeout=timedelta(seconds=60)):
        assert os.environ["HCCL_EXEC_TIMEOUT"] == "90"
    assert os.environ["HCCL_EXEC_TIMEOUT"] == "90"
    (message,) = caplog.messages
    assert "90 s because of HCCL_EXEC_TIMEOUT" in message


@pytest.mark.parametrize("rubbish", ["soon", "-1", "1.5", "", "\u0663"])
def test_an_invalid_setting_is_named(alone, monkeypatch, rubbish):
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", rubbish)
    with pytest.raises(ConfigurationError, match="HCCL_EXEC_TIMEOUT"), alone():
        pass


@pytest.mark.parametrize("detail", [False, True])
def test_hccls_own_analysis_of_timeouts_is_on_where_torch_is_asked_for_details(alone, monkeypatch, detail):
    """Not otherwise: it writes to the job's store in each collective."""
    analysis = ("TORCH_HCCL_DESYNC_DEBUG", "TORCH_HCCL_DUMP_ON_TIMEOUT")
    for name in analysis:
        monkeypatch.delenv(name, raising=False)
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL if detail else dist.DebugLevel.OFF)
    try:
        with alone():
            assert [os.environ.get(name) for name in analysis] == (["1", "1"] if detail else [None, None])
    finally:
        dist.set_debug_level(level)

"""How a process joins a job: whose the group is, and places that do not exist."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import accelcore
from accelcore.errors import ConfigurationError, DistributedError
from accelcore.jobs.collectives import TorchCollectives, store_of_ranks
from accelcore.jobs.launchers import Launch


@pytest.fixture(autouse=True)
def _no_group_is_left():
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def meeting(tmp_path):
    """A place where the ranks of one job can meet."""
    return f"file://{tmp_path}/meeting"


# A job of one process, and whose the group is.


def test_a_job_of_one_rank_has_a_group_of_its_own_for_the_length_of_the_block(accel, meeting):
    with accel.distributed(rank=0, world_size=1, init_method=meeting) as collectives:
        assert dist.is_initialized()
        assert (collectives.rank, collectives.world_size) == (0, 1)
        assert collectives.cpu_group() is dist.group.WORLD
        assert collectives.all_reduce(torch.tensor([2.0]), "avg").tolist() == [2.0]
    assert not dist.is_initialized()


def test_the_group_is_left_also_by_an_exception(accel, meeting):
    with pytest.raises(KeyError), accel.distributed(rank=0, world_size=1, init_method=meeting):
        raise KeyError
    assert not dist.is_initialized()


def test_the_timeout_reaches_torch(accel, meeting):
    with accel.distributed(rank=0, world_size=1, init_method=meeting, timeout=timedelta(seconds=77)):
        # torch offers no public way to read it.
        assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)


@pytest.mark.parametrize("detail", [False, True])
def test_records_of_collectives_are_kept_unless_the_user_says_how(meeting, monkeypatch, detail):
    for name in ("RECORD", "SLOW", "CHOSEN"):
        monkeypatch.setenv(name, "before")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("CHOSEN", "mine")
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL if detail else dist.DebugLevel.OFF)
    collectives = TorchCollectives(
        torch.device("cpu"), "gloo", records={"RECORD": "1", "CHOSEN": "1"}, detailed={"SLOW": "1"}
    )
    try:
        collectives.init(Launch(0, 1, 0, meeting))
        assert [os.environ.get(name) for name in ("RECORD", "CHOSEN", "SLOW")] == ["1", "mine", "1" if detail else None]
    finally:
        collectives.close()
        dist.set_debug_level(level)
    assert [os.environ.get(name) for name in ("RECORD", "CHOSEN", "SLOW")] == [None, "mine", None]


def test_a_group_that_cannot_be_formed_is_reported_and_its_records_are_off(meeting, monkeypatch):
    monkeypatch.delenv("RECORD", raising=False)
    collectives = TorchCollectives(torch.device("cpu"), "xccl", records={"RECORD": "1"})  # torch lacks it
    with pytest.raises(DistributedError, match=r"(?s)process group.*'xccl'") as refused:
        collectives.init(Launch(0, 1, 0, meeting))
    assert refused.value.__cause__ is not None
    assert "RECORD" not in os.environ


@pytest.mark.parametrize("arguments", [{}, {"rank": 0, "world_size": 1}])
def test_a_group_that_the_script_formed_is_adopted_and_left_alone(accel, meeting, arguments):
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    with accel.distributed(**arguments) as collectives:
        assert collectives.cpu_group() is dist.group.WORLD
    assert dist.is_initialized()
    with pytest.raises(KeyError), accel.distributed(**arguments):
        raise KeyError
    assert dist.is_initialized()


def test_a_group_that_does_not_fit_is_refused_and_left_alone(accel, meeting):
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    with (
        pytest.raises(DistributedError, match=r"this is rank 0 of 1, not rank 1 of 2"),
        accel.distributed(rank=1, world_size=2),
    ):
        pytest.fail("a group of one was taken for a group of two")
    assert dist.is_initialized()


def test_a_group_that_cannot_take_this_devices_tensors_is_refused(accel, meeting):
    dist.init_process_group("cuda:gloo", init_method=meeting, rank=0, world_size=1)
    with pytest.raises(DistributedError, match="cannot reduce cpu tensors") as caught, accel.distributed():
        pytest.fail("a group without the CPU was adopted")
    assert "backend='gloo'" in caught.value.remedy
    assert dist.is_initialized()


def test_a_block_within_a_block_adopts_the_outer_ones_group_and_leaves_it_alone(accel, meeting):
    with accel.distributed(rank=0, world_size=1, init_method=meeting):
        with accel.distributed():
            assert dist.is_initialized()
        assert dist.is_initialized(), "the inner block has closed the outer block's group"
    assert not dist.is_initialized()


def test_another_backend_adopts_the_group_too(accel, meeting):
    with accel.distributed(rank=0, world_size=1, init_method=meeting):
        with accelcore.select("cpu").distributed() as collectives:
            assert collectives.cpu_group() is dist.group.WORLD
        assert dist.is_initialized()


def test_a_script_may_destroy_the_group_itself(accel, meeting):
    with accel.distributed(rank=0, world_size=1, init_method=meeting):
        dist.destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.parametrize("closed", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_process_whose_job_was_left_by_an_error_writes_what_it_has_and_does_not_end_with_0(closed, tmp_path):
    file = tmp_path / "results"
    script = (
        "import atexit, accelcore",
        f"results = open({str(file)!r}, 'w'); results.write('all')",
        "atexit.register(print, 'the end')",
        "accel = accelcore.select('cpu')",
        "accel.join()",
        "accel.collectives.barrier = lambda: 1 / 0",
        "import sys; print('the end'); sys.stdout.close(); atexit.unregister(print)" if closed else "",
    )
    ended = subprocess.run([sys.executable, "-c", "\n".join(script)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, file.read_text()) == (120, "the end\n", "all")
    assert ended.stderr == "ZeroDivisionError: division by zero\n"


def test_one_job_may_follow_another(accel, tmp_path):
    for number in range(2):
        with accel.distributed(rank=0, world_size=1, init_method=f"file://{tmp_path}/{number}") as collectives:
            assert collectives.cpu_group() is not None


# Places that do not exist.


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"rank": 0}, "come together"),
        ({"world_size": 1}, "come together"),
        ({"local_rank": 0}, "local_rank needs"),
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"rank": -1, "world_size": 2}, "rank=-1"),
        ({"rank": 0, "world_size": 0}, "world_size=0"),
        ({"rank": 0, "world_size": 2, "local_rank": 2}, "local_rank=2"),
    ],
)
def test_an_invalid_place_is_refused_before_anything_is_formed(accel, arguments, says):
    with pytest.raises(ConfigurationError, match=says), accel.distributed(**arguments):
        pytest.fail("it was joined")
    assert not dist.is_initialized()


def test_an_invalid_variable_of_a_launcher_is_refused(accel, monkeypatch):
    monkeypatch.setenv("RANK", "zero")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigurationError, match="RANK is 'zero'"), accel.distributed():
        pytest.fail("it was joined")


@pytest.mark.parametrize("method", ["env://", "bogus", "nfs://somewhere", "tcp://", "tcp://127.0.0.1", "file://"])
def test_a_meeting_place_that_cannot_be_is_an_error_that_names_it(accel, method):
    with (
        pytest.raises(DistributedError, match=rf"rank 0 of 1 could not join the others at {method}\n") as caught,
        accel.distributed(rank=0, world_size=1, init_method=method),
    ):
        pytest.fail("it was joined")
    assert isinstance(caught.value.__cause__, RuntimeError | ValueError)
    assert caught.value.why
    assert not dist.is_initialized()


def test_ranks_that_never_come_are_given_up_after_the_timeout(accel, meeting):
    begin = time.monotonic()
    with (
        pytest.raises(DistributedError, match=f"rank 1 of 2 did not come to {meeting} in 1 seconds"),
        accel.distributed(rank=0, world_size=2, init_method=meeting, timeout=timedelta(seconds=1)),
    ):
        pytest.fail("it was joined")
    assert 0.5 < time.monotonic() - begin < 20
    with accel.distributed(rank=0, world_size=1, init_method=f"{meeting}-again") as collectives:
        assert collectives.world_size == 1


@pytest.mark.parametrize(
    ("launcher", "came", "absent"),
    [("env://", [0], "ranks 1 and 2"), ("tcp://", [1], "rank 0"), ("tcp://", [0, 2], "rank 1")],
)
def test_ranks_that_never_started_are_named_with_the_address(monkeypatch, launcher, came, absent):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))

    def join(rank):
        launch = Launch(rank, 3, rank, launcher if launcher == "env://" else address)
        with pytest.raises(DistributedError) as caught:
            store_of_ranks(launch, timedelta(seconds=2))
        return caught.value.what

    with ThreadPoolExecutor() as threads:
        said = list(threads.map(join, came))
    assert said[0] == f"{absent} of 3 did not come to {address} in 2 seconds"


@pytest.mark.parametrize("timeout", ["25", timedelta(), timedelta(seconds=-1)], ids=str)
def test_a_timeout_that_is_no_length_of_time_is_refused(accel, timeout):
    with pytest.raises(accelcore.ConfigurationError, match="timeout="), accel.distributed(timeout=timeout):
        raise AssertionError("it was joined")

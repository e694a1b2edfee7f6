"""How many ranks `accelcore run` starts, and what a backend tells schedulers."""

from __future__ import annotations

import pytest

import accelcore
from accelcore.devices.select import rank_count
from accelcore.errors import BackendUnavailableError


@pytest.fixture
def devices(fakes, monkeypatch):
    """Three devices that a variable has chosen, and one that all ranks share."""
    fakes.backend("three", count=3, priority=500, visible_devices="THREE_VISIBLE", kubernetes="example.com/three")
    fakes.backend("shared", count=1, exclusive=False, priority=-1)
    monkeypatch.setenv("THREE_VISIBLE", "0,4,5")


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("request_", "wanted", "ranks"),
    [
        ("three", None, 3),
        ("auto", None, 3),
        ("shared", None, 1),
        ("nowhere,three", None, 3),
        ("three:1", None, 3),
        ("three", 2, 2),
        ("shared", 7, 7),
        ("three,cpu", 7, 7),
        ("auto", 7, 7),
    ],
)
def test_ranks_have_a_device_each_or_share_one(request_, wanted, ranks):
    assert rank_count(request_, "--device", wanted) == ranks


@pytest.mark.usefixtures("devices")
def test_too_many_ranks_are_refused_with_the_variable_that_hides_devices():
    with pytest.raises(BackendUnavailableError, match="4 ranks") as caught:
        rank_count("three", "--device", 4)
    assert "THREE_VISIBLE='0,4,5'" in caught.value.why
    assert caught.value.remedy.endswith("ask for 4: example.com/three under Kubernetes")
    with pytest.raises(BackendUnavailableError, match="THREE_VISIBLE"):
        accelcore.select("three:3")


@pytest.mark.usefixtures("devices")
def test_a_device_that_does_not_work_starts_no_rank(fakes):
    fakes.backend("gone", available=False, count=0, reason="unplugged", remedy="plug it in")
    with pytest.raises(BackendUnavailableError, match="unplugged"):
        rank_count("gone", "--device")


def test_what_schedulers_need_is_in_the_probe(devices):
    found = accelcore.installed()
    assert (found["three"].visible_devices, found["three"].kubernetes) == ("THREE_VISIBLE", "example.com/three")
    assert (found["three"].ranks, found["shared"].ranks, found["cpu"].ranks) == (3, 1, 1)
    assert found["cpu"].visible_devices == ""
    for name in ("cuda", "npu"):
        assert all((found[name].visible_devices, found[name].slurm, found[name].kubernetes, found[name].ray)), name


def test_auto_reaches_the_launcher(machine, launch):
    machine.fakes.backend("pair", count=2, priority=500)
    line = r"import os, sys; sys.stdout.write('rank {RANK} of {WORLD_SIZE}\n'.format(**os.environ))"
    script = machine.write("script.py", line)  # which writes in one piece, or the ranks' lines mix
    done = launch("--nproc", "auto", "--device", "pair", script)
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"], done.stderr
    refused = machine.run("run", "--nproc", "3", "--device", "pair", script)
    assert (refused.returncode, refused.stdout) == (64, "")
    assert "3 ranks need 3 pair devices" in refused.stderr

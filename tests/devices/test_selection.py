"""Which backend and device a request gets."""

from __future__ import annotations

import logging
import re

import pytest

import accelcore
from accelcore.errors import BackendUnavailableError, ConfigurationError, PluginError, UnknownBackendError

BROKEN = "raise ImportError('libdevice.so.1 is missing')"
UNAVAILABLE = {"available": False, "count": 0, "reason": "no such card", "remedy": "buy one"}


def launch(monkeypatch, *, rank=0, world_size=4, **local):
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": 29500, **(local or {"local_rank": 0})}
    for variable, value in variables.items():
        monkeypatch.setenv(variable.upper(), str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


# One choice is an order.


def test_the_argument_outranks_the_variable_which_is_not_even_read(monkeypatch):
    monkeypatch.setenv("ACCEL_DEVICE", "rubbish?")
    assert accelcore.select("cpu").name == "cpu"


def test_the_variable_is_taken_where_there_is_no_argument(monkeypatch, fakes):
    fakes.backend("fromvariable", priority=-1)
    monkeypatch.setenv("ACCEL_DEVICE", " FromVariable:0 ")
    assert accelcore.select().name == "fromvariable"


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("device", ["", None])
def test_an_empty_wantedis_none(monkeypatch, fakes, device):
    fakes.backend("only")
    fakes.backend("other", priority=-1)
    monkeypatch.setenv("ACCEL_DEVICE", "")
    assert accelcore.select(device).name == "only"
    monkeypatch.setenv("ACCEL_DEVICE", "other")
    assert accelcore.select(device).name == "other"


def test_each_call_makes_a_new_backend():
    assert accelcore.select("cpu") is not accelcore.select("cpu")


def test_an_index_picks_the_device(fakes):
    fakes.backend("three", count=3)
    assert [accelcore.select(f"three:{index}").index for index in range(3)] == [0, 1, 2]
    assert accelcore.select("three").index == 0


def test_an_index_that_is_not_there_is_refused_and_never_replaced(fakes):
    fakes.backend("three", count=3)
    with pytest.raises(BackendUnavailableError, match=r"device='three:3'.* no device three:3") as caught:
        accelcore.select("three:3")
    assert caught.value.available == "three:0 to three:2"


def test_one_choice_that_is_unavailable_says_why_and_what_to_do(fakes):
    fakes.backend("absent", **UNAVAILABLE)
    with pytest.raises(BackendUnavailableError, match="device='absent' cannot be used here") as caught:
        accelcore.select("absent")
    assert (caught.value.why, caught.value.remedy) == ("no such card", "buy one")
    assert "cpu" in caught.value.available
    assert "absent" not in caught.value.available


def test_one_choice_that_is_not_installed_says_how_to_get_it():
    with pytest.raises(UnknownBackendError, match=r"device='nowhere:3': there is no backend 'nowhere'") as caught:
        accelcore.select("nowhere:3")
    assert "install its package" in caught.value.remedy
    assert "cpu" in caught.value.available


def test_one_choice_whose_plugin_is_broken_raises_from_the_plugins_own_error(fakes):
    fakes.install(BROKEN, backends=["rotten"])
    with pytest.raises(PluginError, match="'rotten'") as caught:
        accelcore.select("rotten")
    assert isinstance(caught.value.__cause__, ImportError)
    assert "libdevice.so.1 is missing" in caught.value.why
    assert "cpu" in caught.value.available


# A list, and auto, may fall back.


def test_a_list_is_tried_in_its_order_whatever_the_priorities(fakes):
    fakes.backend("lowly", priority=1)
    fakes.backend("lofty", priority=1000)
    backend = accelcore.select("lowly,lofty")
    assert (backend.name, backend.passed_over) == ("lowly", ())


def test_a_list_passes_over_what_cannot_be_had_and_remembers_why(fakes):
    fakes.install(BROKEN, backends=["rotten"])
    fakes.backend("absent", **UNAVAILABLE)
    fakes.backend("single")
    fakes.backend("stubborn", create="raise OSError('no power')")
    backend = accelcore.select("nowhere,rotten,absent,single:1,stubborn,single,cpu")
    assert (backend.name, backend.index) == ("single", 0)
    reasons = {probe.name: probe.reason for probe in backend.passed_over}
    assert list(reasons) == ["nowhere", "rotten", "absent", "single:1", "stubborn"]
    assert "no installed plugin" in reasons["nowhere"]
    assert "libdevice.so.1 is missing" in reasons["rotten"]
    assert reasons["absent"] == "no such card"
    assert reasons["single:1"] == "this process sees 1 single device, numbered from 0"
    assert "no power" in reasons["stubborn"]
    assert not any(probe.available for probe in backend.passed_over)
    assert all(probe.remedy for probe in backend.passed_over)


def test_a_list_of_which_nothing_can_be_had_says_why_of_each(fakes):
    fakes.backend("absent", **UNAVAILABLE)
    with pytest.raises(BackendUnavailableError, match="'absent,nowhere': none of the choices") as caught:
        accelcore.select("absent,nowhere")
    assert caught.value.why == "absent: no such card; nowhere: no installed plugin offers that name"
    assert "buy one" in caught.value.remedy
    assert "install its package" in caught.value.remedy
    assert "cpu" in caught.value.available


def test_a_list_from_the_variable_that_fails_names_the_variable(monkeypatch):
    monkeypatch.setenv("ACCEL_DEVICE", "nowhere,cpu:9")
    with pytest.raises(BackendUnavailableError, match="ACCEL_DEVICE"):
        accelcore.select()


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("wanted", [None, "auto"])
def test_auto_takes_the_highest_priority_that_works(fakes, wanted):
    fakes.backend("middling", priority=10)
    fakes.backend("best", priority=100, **UNAVAILABLE)
    fakes.backend("better", priority=50)
    fakes.backend("worst", priority=-3)
    backend = accelcore.select(wanted)
    assert backend.name == "better"
    assert [(probe.name, probe.reason) for probe in backend.passed_over] == [("best", "no such card")]


@pytest.mark.usefixtures("nothing_installed")
def test_auto_takes_the_first_name_among_equals(fakes):
    for name in ("medea", "argo", "zeta"):
        fakes.backend(name, priority=7)
    assert accelcore.select().name == "argo"


@pytest.mark.usefixtures("nothing_installed")
def test_auto_passes_over_a_backend_that_cannot_be_created(fakes):
    fakes.backend("host")
    fakes.backend("proud", priority=100, create="raise RuntimeError('the driver is too old')")
    backend = accelcore.select()
    assert backend.name == "host"
    assert "the driver is too old" in backend.passed_over[0].reason


@pytest.mark.usefixtures("nothing_installed")
def test_auto_names_a_plugin_that_is_broken(fakes, caplog):
    fakes.backend("host", priority=100)
    fakes.install(BROKEN, backends=["rotten"])
    assert accelcore.select().name == "host"
    assert re.search("auto chose host:0; rotten does not work: .*libdevice.so.1 is missing", caplog.text)


@pytest.mark.usefixtures("nothing_installed")
def test_with_nothing_installed_every_wantedsays_what_to_install():
    assert accelcore.installed() == {}
    with pytest.raises(BackendUnavailableError, match="no backend is installed") as caught:
        accelcore.select()
    assert "accelcore-cpu" in caught.value.remedy
    with pytest.raises(UnknownBackendError, match="there is no backend 'cpu'") as caught:
        accelcore.select("cpu")
    assert caught.value.available == "no other backend"


def test_what_was_passed_over_is_logged_once(fakes, caplog):
    fakes.backend("vanished", **UNAVAILABLE)
    caplog.set_level(logging.DEBUG, logger="accelcore")
    for _ in range(3):
        accelcore.select("vanished,cpu")
    (record,) = [record for record in caplog.records if "vanished" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "device='vanished,cpu' chose cpu:0; vanished does not work: no such card"


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(
    ("name", "absent", "emulated", "wanted"),
    [
        ("far", True, True, None),
        ("real", True, False, None),
        ("ill", False, True, None),
        ("far", True, True, "far,host"),
    ],
)
def test_auto_does_not_warn_of_an_absent_device_whose_emulator_is_installed(
    fakes, caplog, name, absent, emulated, wanted
):
    fakes.backend("host")
    fakes.backend(name, **UNAVAILABLE, absent=absent, priority=100)
    if emulated:
        fakes.install("", emulators=[name])
    (passed_over,) = accelcore.select(wanted).passed_over
    assert (passed_over.name, passed_over.absent) == (name, absent)
    assert bool(caplog.messages) == (not (absent and emulated) or wanted is not None)


def test_a_first_choice_that_works_logs_nothing(fakes, caplog):
    fakes.backend("absent", **UNAVAILABLE)
    caplog.set_level(logging.DEBUG, logger="accelcore")
    accelcore.select("cpu,absent")
    accelcore.select("cpu")
    assert caplog.records == []


def test_only_rank_0_logs_what_was_passed_over(monkeypatch, fakes, caplog):
    fakes.backend("gone", **UNAVAILABLE)
    launch(monkeypatch, rank=1)
    assert accelcore.select("gone,cpu").passed_over
    assert caplog.records == []
    launch(monkeypatch, rank=0)
    accelcore.select("gone,cpu")
    assert len(caplog.records) == 1


# A rank takes its own device.


def test_a_rank_takes_the_device_of_its_local_rank(monkeypatch, fakes):
    fakes.backend("four", count=4)
    launch(monkeypatch, rank=3, local_rank=2)
    assert accelcore.select("four").index == 2
    assert accelcore.select("nowhere,four").index == 2
    assert accelcore.select("four:1").index == 1


def test_ranks_share_a_device_that_is_not_exclusive(monkeypatch, fakes):
    fakes.backend("shared", count=4, exclusive=False)
    launch(monkeypatch, rank=3, local_rank=2)
    assert accelcore.select("shared").index == 0
    assert accelcore.select("cpu").index == 0


def test_a_rank_without_a_device_of_its_own_is_refused(monkeypatch, fakes):
    fakes.backend("pair", count=2)
    launch(monkeypatch, rank=3, local_rank=2)
    with pytest.raises(BackendUnavailableError, match=r"rank 2 of this host: there is no device pair:2") as caught:
        accelcore.select("pair")
    assert caught.value.available == "pair:0 to pair:1"
    assert "ranks" in caught.value.remedy


def srun(monkeypatch, **variables):
    """Rank 3 of 4, the second of its host."""
    place = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "node[7-8]"}
    for variable, value in {**place, "MASTER_PORT": "29500", **variables}.items():
        monkeypatch.setenv(variable, value)


@pytest.mark.parametrize(
    "says",
    [
        {"SLURM_GPUS_PER_TASK": "1"},
        {"SLURM_GPUS_PER_TASK": "a100:1"},
        {"SLURM_TRES_PER_TASK": "cpu=8,gres/npu=1"},
        {"SLURM_GPU_BIND": "verbose,per_task:1"},
        {"SLURMD_TRES_BIND": "gpu:per_task:1"},  # srun --gpus-per-task=1
        {"SLURMD_TRES_BIND": "gpu:single:1"},  # srun --ntasks-per-gpu=1
        {"SLURMD_TRES_BIND": "gres/gpu:verbose,map:0,1"},
        {"SLURMD_TRES_BIND": "gres/nic:single:1+gres/gpu:closest"},
    ],
    ids=str,
)
def test_a_rank_that_srun_shows_one_device_of_its_own_takes_it_and_the_log_says_so(monkeypatch, fakes, caplog, says):
    name = f"single{len(str(says))}"  # what was said once is not said again
    fakes.backend(name, count=1)
    srun(monkeypatch, **says)
    with caplog.at_level(logging.INFO, "accelcore"):
        assert [accelcore.select(name).index, accelcore.select(f"nowhere,{name}").index] == [0, 0]
    assert [record.levelname for record in caplog.records if "takes single" in record.message] == ["INFO"]


@pytest.mark.parametrize(
    "says",
    [
        {},
        {"SLURM_TRES_PER_TASK": "cpu=8"},
        {"SLURM_GPU_BIND": "none"},
        {"SLURMD_TRES_BIND": "gres/gpu:none"},
        {"SLURMD_TRES_BIND": "gres/nic:single:1"},
        {"LOCAL_RANK": "1"},
    ],
    ids=str,
)
def test_ranks_that_see_the_same_device_do_not_share_it_in_silence(monkeypatch, fakes, says):
    """As in a job of two by torchrun on a machine with one."""
    fakes.backend("single", count=1)
    own = {"SLURM_GPUS_PER_TASK": "1", "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "host"}  # of a launcher in a task
    srun(monkeypatch, **says, **(own if "LOCAL_RANK" in says else {}))
    with pytest.raises(BackendUnavailableError, match="rank 1 of this host: there is no device single:1"):
        accelcore.select("single")


def test_ranks_that_srun_shows_several_devices_count_them(monkeypatch, fakes):
    fakes.backend("four", count=4)
    srun(monkeypatch, SLURM_GPUS_PER_TASK="1")  # asked for in the batch script, and not kept to
    assert accelcore.select("four").index == 1


@pytest.mark.parametrize("wanted", ["auto", "pair,host"])
@pytest.mark.usefixtures("nothing_installed")
def test_a_rank_does_not_fall_back_where_its_neighbours_do_not(monkeypatch, fakes, wanted):
    """Two ranks on the accelerator and the third on the CPU cannot form one job, and would find out by hanging."""
    fakes.backend("pair", count=2, priority=100)
    fakes.backend("host", exclusive=False)
    launch(monkeypatch, rank=1, local_rank=1)
    assert accelcore.select(wanted).name == "pair"
    launch(monkeypatch, rank=2, local_rank=2)
    with pytest.raises(BackendUnavailableError, match="rank 2 of this host"):
        accelcore.select(wanted)


@pytest.mark.parametrize("wanted", ["four", "four,cpu"])
def test_without_a_local_rank_a_job_of_several_hosts_must_say_which_device(monkeypatch, fakes, wanted):
    fakes.backend("four", count=4)
    launch(monkeypatch, rank=2, local_world_size=2)
    with pytest.raises(ConfigurationError, match="LOCAL_RANK is not set") as caught:
        accelcore.select(wanted)
    assert "set LOCAL_RANK" in caught.value.remedy
    assert "four:0" in caught.value.remedy
    assert accelcore.select("four:3").index == 3
    assert accelcore.select("cpu").name == "cpu", "ranks share it, so that it takes no number"


def test_without_a_local_rank_a_job_of_one_host_counts_its_devices_by_rank(monkeypatch, fakes):
    fakes.backend("four", count=4)
    launch(monkeypatch, rank=2, local_world_size=4)
    assert accelcore.select("four").index == 2


def test_a_script_that_starts_its_own_ranks_says_which_this_is(monkeypatch, fakes):
    fakes.backend("four", count=4)
    fakes.backend("shared", count=4, exclusive=False)
    assert accelcore.select("four", local_rank=2).index == 2
    assert accelcore.select("four:1", local_rank=2).index == 1
    assert accelcore.select("shared", local_rank=2).index == 0
    launch(monkeypatch, rank=1, local_rank=1)
    assert accelcore.select("four", local_rank=3).index == 3
    for wrong in (-1, True, "0"):
        with pytest.raises(ConfigurationError, match="local_rank="):
            accelcore.select("four", local_rank=wrong)

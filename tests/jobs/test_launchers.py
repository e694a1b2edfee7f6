from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import accelcore
from accelcore.errors import ConfigurationError
from accelcore.jobs.launchers import JOB_VARIABLES, LAUNCHERS, Launch, outside_any_job, read_launch

GOOD = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
NEAR_MISSES = (
    *(
        " ",
        "+1",
        "-1",
        "-0",
        "00",
        "01",
        " 1",
        "1 ",
        "1\n",
        "\t1",
        "1.0",
        "1e0",
        "0x1",
        "1_0",
        "1,0",
        "one",
        "None",
    ),
    *("True", "inf", "nan", "\u0661", "\uff11", "\xb2", "1\x00", "9" * 10, "9" * 5000),
)


def raises_naming(variable):
    return pytest.raises(ConfigurationError, match=rf"\A(the environment variable )?{variable}\b")


def natural(text):
    """Whether this is how a launcher writes a number: the rule, said in another way than in the code."""
    return 0 < len(text) < 10 and text.isascii() and text.isdigit() and text == str(int(text))


def test_without_a_launcher_there_is_no_launch():
    assert read_launch({}) is None
    assert read_launch({"MASTER_ADDR": "nonsense", "MASTER_PORT": "nonsense", "LOCAL_WORLD_SIZE": "-3"}) is None


def test_what_torchrun_leaves_is_read():
    assert read_launch(GOOD) == Launch(rank=2, world_size=4, local_rank=0, init_method="env://")


def test_the_process_environment_is_read_by_default(monkeypatch):
    assert read_launch() is None
    for variable, value in GOOD.items():
        monkeypatch.setenv(variable, value)
    assert read_launch() == read_launch(GOOD)


@given(data=st.data())
def test_every_sensible_job_is_read(data):
    world_size = data.draw(st.integers(1, 999_999_999))
    local_size = data.draw(st.integers(1, world_size))
    rank = data.draw(st.integers(0, world_size - 1))
    local_rank = data.draw(st.integers(0, local_size - 1))
    environ = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": data.draw(st.sampled_from(["localhost", "::1", "node-0.example"])),
        "MASTER_PORT": str(data.draw(st.integers(1, 65535))),
    }
    if data.draw(st.booleans()):
        del environ["LOCAL_WORLD_SIZE"]
    assert read_launch(environ) == Launch(rank, world_size, local_rank, "env://")


@pytest.mark.parametrize("variable", NUMBERS)
@given(value=st.one_of(st.sampled_from(NEAR_MISSES), st.text(), st.from_regex(r"\A[-+0-9. ]{1,4}\Z")))
def test_a_value_that_is_no_number_is_an_error_that_names_the_variable(variable, value):
    assume(value and not natural(value))
    with raises_naming(variable) as caught:
        read_launch({**GOOD, variable: value})
    message = str(caught.value)
    assert len(message) < 1000
    assert message.replace("\n", "").isprintable()
    assert message.isascii()


@pytest.mark.parametrize("variable", sorted(set(GOOD) - {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}))
def test_a_variable_that_is_missing_is_named(variable):
    environ = {key: value for key, value in GOOD.items() if key != variable}
    with raises_naming(variable) as caught:
        read_launch(environ)
    assert "is not set" in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WORLD_SIZE", "0"),
        ("RANK", "4"),
        ("RANK", "999999999"),
        ("LOCAL_RANK", "2"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("LOCAL_WORLD_SIZE", "5"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
        ("MASTER_ADDR", " \t"),
    ],
)
def test_a_number_that_does_not_fit_the_others_is_an_error_that_names_its_variable(variable, value):
    with raises_naming(variable):
        read_launch({**GOOD, variable: value})


def test_without_a_local_size_the_local_rank_is_bounded_by_the_job():
    environ = {key: value for key, value in GOOD.items() if key != "LOCAL_WORLD_SIZE"}
    assert read_launch({**environ, "LOCAL_RANK": "3"}).local_rank == 3
    with raises_naming("LOCAL_RANK"):
        read_launch({**environ, "LOCAL_RANK": "4"})


@pytest.mark.parametrize(
    ("variables", "local_rank"),
    [
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, 2),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 0),
        ({"RANK": "2", "WORLD_SIZE": "4"}, None),
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, None),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1"}, None),
    ],
)
def test_a_local_rank_that_is_missing_is_derived_on_one_host_and_unknown_elsewhere(variables, local_rank):
    launch = read_launch({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **variables})
    assert launch == Launch(int(variables["RANK"]), int(variables["WORLD_SIZE"]), local_rank, "env://")


def test_a_child_outside_any_job_keeps_the_rest_of_the_environment():
    assert outside_any_job({**GOOD, "PATH": "/bin", "ACCEL_DEVICE": "cpu"}) == {"PATH": "/bin", "ACCEL_DEVICE": "cpu"}


@pytest.mark.parametrize(
    ("rank", "world_size", "local_rank", "culprit"),
    [
        (0, 0, 0, "world_size"),
        (0, -1, 0, "world_size"),
        (-1, 2, 0, "rank"),
        (2, 2, 0, "rank"),
        (0, 2, -1, "local_rank"),
        (0, 2, 2, "local_rank"),
    ],
)
def test_a_place_that_does_not_exist_is_refused(rank, world_size, local_rank, culprit):
    with pytest.raises(ConfigurationError, match=rf"\A{culprit}="):
        Launch(rank, world_size, local_rank, "env://")


def test_select_refuses_an_invalid_launch(monkeypatch):
    for variable, value in {**GOOD, "RANK": "4"}.items():
        monkeypatch.setenv(variable, value)
    with raises_naming("RANK") as caught:
        accelcore.select("cpu")
    assert re.search(r"torchrun|unset", caught.value.remedy)


# Each launcher, by what it leaves for rank 2 of 4, the first on the second of two hosts.

MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
OPEN_MPI = {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-login-4711@1", "PMIX_RANK": "2"}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "node[06-08]",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
TOLD = {
    "torchrun, accelcore run or Ray Train": GOOD,
    "Kubernetes' PyTorchJob, or a scheduler like it": {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "PET_NODE_RANK": "2",
        "PET_NNODES": "4",
        "PET_NPROC_PER_NODE": "auto",
        "MASTER_ADDR": "job-master-0",
        "MASTER_PORT": "23456",
    },
    "Open MPI's mpirun": {**OPEN_MPI, "MASTER_ADDR": "node07"},
    "MPICH's or Intel MPI's mpirun": {**HYDRA, "MASTER_ADDR": "node07", "MASTER_PORT": "29500"},
    "SLURM's srun": SRUN,
}


def meeting(launch):
    """Host and port of a `tcp://` meeting place."""
    host, _, port = launch.init_method.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def test_every_launcher_of_the_table_is_tested():
    assert list(TOLD) == [launcher.name for launcher in LAUNCHERS]


@pytest.mark.parametrize("name", TOLD)
def test_each_launchers_rank_is_read(name):
    launch = read_launch(TOLD[name])
    assert (launch.rank, launch.world_size, launch.local_rank) == (2, 4, 0)
    if "LOCAL_RANK" in TOLD[name] or "RANK" in TOLD[name]:
        assert launch.init_method == "env://"
    else:
        host, port = meeting(launch)
        assert host == "node07"
        assert 1024 <= port < 32768, "below those that systems give to clients"


@pytest.mark.parametrize("name", TOLD)
def test_of_each_launcher_a_variable_that_is_missing_or_no_number_is_named(name):
    launcher = next(one for one in LAUNCHERS if one.name == name)
    for variable in (launcher.rank, launcher.world_size):
        told = dict(TOLD[name])
        with raises_naming(variable):
            read_launch(told | {variable: "2.0"})
        if (variable,) != launcher.signs:
            del told[variable]
            with raises_naming(variable) as caught:
                read_launch(told)
            assert launcher.name in caught.value.why
    with raises_naming(launcher.local_rank):
        read_launch(TOLD[name] | {launcher.local_rank: "4"})


def test_the_ranks_of_one_job_meet_and_those_of_two_do_not():
    def place(told, **other):
        return meeting(read_launch(told | other))

    assert place(SRUN, SLURM_PROCID="0") == place(SRUN, SLURM_PROCID="3", SLURM_LOCALID="1")
    assert len({place(SRUN), place(SRUN, SLURM_STEP_ID="1"), place(SRUN, SLURM_JOB_ID="4712")}) == 3
    one_host = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert place(one_host)[0] == "127.0.0.1"
    assert place(one_host) == place(one_host, OMPI_COMM_WORLD_RANK="0")
    assert place(one_host) != place(one_host, PMIX_NAMESPACE="prterun-login-4712@1")


def test_what_the_user_says_of_the_meeting_place_stands():
    assert meeting(read_launch(SRUN | {"MASTER_ADDR": "fe80::1", "MASTER_PORT": "29999"})) == ("[fe80::1]", 29999)
    with raises_naming("MASTER_ADDR"):
        read_launch(SRUN | {"MASTER_ADDR": " "})
    with raises_naming("MASTER_PORT"):
        read_launch(SRUN | {"MASTER_PORT": "0"})


def test_a_meeting_place_that_nothing_tells_has_to_be_said():
    with raises_naming("MASTER_ADDR") as caught:
        read_launch(OPEN_MPI)
    assert "for all ranks" in caught.value.remedy
    with raises_naming("MASTER_PORT"):
        read_launch(HYDRA | {"MPI_LOCALNRANKS": "4"})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("login", "login"),
        ("node[07-08]", "node07"),
        ("node[3,5-9],gpu[1-2]", "node3"),
        ("r[1-2]n[04,09].site", "r1n04.site"),
        ("a-1,b[1-2]", "a-1"),
    ],
)
def test_the_first_host_of_a_list_is_where_ranks_meet(hosts, first):
    assert meeting(read_launch(SRUN | {"SLURM_STEP_NODELIST": hosts}))[0] == first


def test_a_batch_script_outside_srun_and_a_job_of_one_are_alone():
    batch = {name: value for name, value in SRUN.items() if "STEP" not in name}
    assert read_launch(batch) is None
    assert read_launch(SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert (
        read_launch(
            OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"} | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
        )
        is None
    )


def test_the_launcher_that_was_called_last_is_believed():
    """torchrun under srun, and mpirun that starts its ranks through srun: what is inherited is not this rank's."""
    daemon = SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert read_launch(daemon | GOOD) == read_launch(GOOD)
    mpi = TOLD["Open MPI's mpirun"]
    assert read_launch(daemon | mpi) == read_launch(mpi)
    assert read_launch(SRUN | {"PMI_RANK": "2", "PMI_SIZE": "4"}) == read_launch(SRUN), "srun --mpi=pmi2"


def test_without_the_number_of_hosts_a_scheduler_leaves_the_local_rank_open():
    told = TOLD["Kubernetes' PyTorchJob, or a scheduler like it"]
    assert read_launch({name: value for name, value in told.items() if name != "PET_NNODES"}).local_rank is None
    assert read_launch(told | {"PET_NNODES": "2"}).local_rank is None


def test_a_child_outside_any_job_is_told_of_none():
    for told in TOLD.values():
        assert read_launch(outside_any_job(told)) is None
        assert set(outside_any_job(told)).isdisjoint(JOB_VARIABLES)


@pytest.mark.parametrize("environ", [GOOD, SRUN, OPEN_MPI], ids=["torchrun", "srun", "mpirun"])
def test_an_empty_variable_is_none(environ):
    def result(environ):
        try:
            return read_launch(environ)
        except ConfigurationError as error:
            return str(error)

    for variable in environ:
        absent = {key: value for key, value in environ.items() if key != variable}
        assert result({**environ, variable: ""}) == result(absent)
    assert read_launch(dict.fromkeys(environ, "")) is None


def test_a_shell_that_empties_a_launchers_variables_starts_one_process(monkeypatch):
    for variable in GOOD:
        monkeypatch.setenv(variable, "")
    with accelcore.select("cpu").distributed() as job:
        assert (job.rank, job.world_size) == (0, 1)

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import accelcore
from accelcore.environment import Launch, outside_any_job, probe_timeout, read_launch
from accelcore.errors import ConfigurationError

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
        "",
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
    assume(not natural(value))
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
        ("MASTER_ADDR", ""),
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


def test_a_probe_may_take_five_seconds_by_default(monkeypatch):
    assert probe_timeout() == 5.0
    monkeypatch.setenv("ACCEL_PROBE_TIMEOUT", "")
    assert probe_timeout() == 5.0, "empty means unset"


@given(whole=st.integers(0, 9999), thousandths=st.one_of(st.none(), st.from_regex(r"\A[0-9]{1,3}\Z")))
def test_a_probe_timeout_in_seconds_is_read(whole, thousandths):
    text = str(whole) + ("" if thousandths is None else f".{thousandths}")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("ACCEL_PROBE_TIMEOUT", text)
        if float(text) > 0:
            assert probe_timeout() == float(text)
        else:
            with raises_naming("ACCEL_PROBE_TIMEOUT"):
                probe_timeout()


@pytest.mark.parametrize(
    "value", [" ", "0", "0.000", "-1", "+1", "inf", "nan", "1e3", "5s", " 5", "5\n", ".5", "5.", "10000", "\u0665"]
)
def test_a_probe_timeout_that_makes_no_sense_is_an_error_that_names_it(monkeypatch, value):
    monkeypatch.setenv("ACCEL_PROBE_TIMEOUT", value)
    with raises_naming("ACCEL_PROBE_TIMEOUT"):
        accelcore.select("cpu")
    with raises_naming("ACCEL_PROBE_TIMEOUT"):
        accelcore.installed()


def test_select_refuses_a_launch_that_makes_no_sense(monkeypatch):
    for variable, value in {**GOOD, "RANK": "4"}.items():
        monkeypatch.setenv(variable, value)
    with raises_naming("RANK") as caught:
        accelcore.select("cpu")
    assert re.search(r"torchrun|unset", caught.value.remedy)


@pytest.mark.parametrize("wrong", [{"rank": "0"}, {"world_size": 2.0}, {"local_rank": True}])
def test_a_place_in_a_job_is_told_in_whole_numbers(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Launch(**{"rank": 0, "world_size": 2, "local_rank": 0, "init_method": "env://"} | wrong)

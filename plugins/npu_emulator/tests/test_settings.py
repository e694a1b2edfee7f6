"""The knobs: environment variables, read strictly, and the dataclass they fill."""

import dataclasses

import pytest
from accelcore_npu_emulator import Fault, Settings
from hypothesis import given
from hypothesis import strategies as st

from accelcore.errors import ConfigurationError

FAULTS = st.one_of(
    st.builds(Fault, st.sampled_from(["overflow", "out_of_memory", "timeout"]), st.integers(1, 10**8)),
    st.builds(Fault, st.just("die"), st.integers(1, 10**8), st.integers(0, 4095)),
    st.builds(Fault, st.just("missing"), operator=st.sampled_from(["aten::add.Tensor", "npu::npu_swiglu"])),
)
SETTINGS = st.builds(
    Settings,
    devices=st.integers(1, 64),
    soc=st.sampled_from(["Ascend910B2", "Ascend910A", "Ascend910_9391"]),
    memory=st.integers(1, 2**50),
    poison=st.booleans(),
    trace=st.sampled_from([None, "-", "/tmp/a trace, with = signs"]),
    faults=st.lists(FAULTS, max_size=4).map(tuple),
)


def read(**variables):
    return Settings.from_environment({f"ACCEL_EMULATED_{name}": text for name, text in variables.items()})


def test_nothing_said_is_a_small_910b():
    assert Settings.from_environment({}) == Settings()
    assert Settings() == Settings(devices=2, soc="Ascend910B2", memory=8 * 2**30, poison=True, trace=None, faults=())


@given(SETTINGS)
def test_settings_survive_the_way_through_the_environment(settings):
    assert Settings.from_environment(settings.variables()) == settings


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"DEVICES": "4"}, {"devices": 4}),
        ({"MEMORY": "1000"}, {"memory": 1000}),
        ({"MEMORY": "3KiB"}, {"memory": 3072}),
        ({"MEMORY": "512MiB"}, {"memory": 512 * 2**20}),
        ({"POISON": "False"}, {"poison": False}),
        ({"POISON": "TRUE"}, {"poison": True}),
        ({"TRACE": "-"}, {"trace": "-"}),
        ({"TRACE": "", "FAULTS": ""}, {}),
        (
            {"FAULTS": "overflow@3,die@0:7,missing@aten::add.Tensor"},
            {"faults": (Fault("overflow", 3), Fault("die", 7, 0), Fault("missing", operator="aten::add.Tensor"))},
        ),
    ],
)
def test_what_can_be_said(variables, expected):
    assert read(**variables) == dataclasses.replace(Settings(), **expected)


@pytest.mark.parametrize("text", ["0", "-1", "65", "two", "", " 2", "2.0", "٢", "1e1", "9" * 30])
def test_invalid_numbers_of_devices_are_refused(text):
    with pytest.raises(ConfigurationError, match=r"ACCEL_EMULATED_DEVICES=.* is not a number of devices"):
        read(DEVICES=text)


@pytest.mark.parametrize("text", ["0", "8GB", "8 GiB", "GiB", "-1", "1.5GiB", "", "2000000GiB"])
def test_invalid_sizes_of_memory_are_refused(text):
    with pytest.raises(ConfigurationError, match=r"ACCEL_EMULATED_MEMORY=.* is not a size in bytes"):
        read(MEMORY=text)


@pytest.mark.parametrize("text", ["yes", "2", "", "None"])
def test_invalid_poison_is_refused(text):
    with pytest.raises(ConfigurationError, match=r"ACCEL_EMULATED_POISON=.* is neither 1 nor 0"):
        read(POISON=text)


@pytest.mark.parametrize("text", ["", "H100", "Ascend", "Ascend 910B"])
def test_chips_that_do_not_exist(text):
    with pytest.raises(ConfigurationError, match="ACCEL_EMULATED_SOC"):
        read(SOC=text)


@pytest.mark.parametrize(
    "text",
    ["overflow", "overflow@0", "overflow@-1", "overflow@1,", "crash@1", "die@1", "die@1:0", "die@:1", "missing@add",
     "missing@", "overflow@1;timeout@1", " overflow@1", "timeout@1:2"],
)  # fmt: skip
def test_invalid_faults_are_refused(text):
    with pytest.raises(ConfigurationError, match=r"ACCEL_EMULATED_FAULTS=.* is not a list of faults"):
        read(FAULTS=text)


def test_a_misspelt_variable_is_not_passed_over():
    with pytest.raises(ConfigurationError, match="ACCEL_EMULATED_DEVICE is unknown"):
        read(DEVICE="2")


@pytest.mark.parametrize(
    "wrong",
    [{"devices": 0}, {"devices": "2"}, {"memory": 2.5}, {"poison": 1.5}, {"soc": "H100"},
     {"faults": (Fault("overflow"),)}],
)  # fmt: skip
def test_arguments_are_checked_as_strictly(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Settings(**wrong)

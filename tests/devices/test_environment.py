from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import accelcore
from accelcore.devices.request import probe_timeout
from accelcore.errors import ConfigurationError


def raises_naming(variable):
    return pytest.raises(ConfigurationError, match=rf"\A{variable}\b")


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
def test_an_invalid_probe_timeout_is_an_error_that_names_it(monkeypatch, value):
    monkeypatch.setenv("ACCEL_PROBE_TIMEOUT", value)
    with raises_naming("ACCEL_PROBE_TIMEOUT"):
        accelcore.select("cpu")
    with raises_naming("ACCEL_PROBE_TIMEOUT"):
        accelcore.installed()

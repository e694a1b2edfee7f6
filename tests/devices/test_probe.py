from __future__ import annotations

import dataclasses

import pytest

import accelcore
from accelcore import Capabilities, Probe

HERE = {"name": "widget", "available": True, "count": 1}
GONE = {"name": "widget", "available": False, "reason": "no card", "remedy": "buy one"}


def test_a_probe_says_what_it_was_given_and_sensible_things_of_the_rest():
    probe = Probe("widget", available=True, count=2)
    assert (probe.name, probe.available, probe.count) == ("widget", True, 2)
    assert (probe.reason, probe.remedy, probe.priority, probe.exclusive, probe.api) == ("", "", 0, True, None)
    assert accelcore.API == 1
    assert Probe(**GONE).count == 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (HERE | {"count": 0}, "count is 0"),
        (HERE | {"count": -1}, "count is -1"),
        (GONE | {"reason": ""}, "reason"),
        (GONE | {"remedy": ""}, "remedy"),
        (HERE | {"name": None}, "name is None"),
        (HERE | {"name": b"widget"}, "name is b'widget'"),
        (HERE | {"available": 1}, "available is 1"),
        (GONE | {"available": None}, "available is None"),
        (GONE | {"reason": ["no card"]}, "reason is"),
        (GONE | {"remedy": None}, "remedy is None"),
        (HERE | {"priority": 1.5}, "priority is 1.5"),
        (HERE | {"priority": "high"}, "priority is 'high'"),
        (HERE | {"count": True}, "count is True"),
        (HERE | {"count": 1.0}, "count is 1.0"),
        (HERE | {"exclusive": "no"}, "exclusive is 'no'"),
        (HERE | {"api": "1"}, "api is '1'"),
    ],
)
def test_invalid_fields_are_refused_by_name(fields, says):
    with pytest.raises(ValueError, match=says) as caught:
        Probe(**fields)
    assert str(fields["name"]) in str(caught.value)


@pytest.mark.parametrize("value", [Probe(**HERE), Capabilities()])
def test_declarations_cannot_be_changed(value):
    for field in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, getattr(value, field.name))
    assert hash(value) == hash(dataclasses.replace(value))


def test_a_backend_that_declares_nothing_can_train_in_fp32_and_no_more():
    able = Capabilities()
    assert (able.model_dtypes, able.parallel, able.autocast_tables) == (("float32",), ("none",), ("torch",))
    others = {"model_dtypes", "parallel", "autocast_tables"}
    assert not any(value for field, value in vars(able).items() if field not in others)

"""`accelcore doctor` foresees what `select()` chooses, and whether it raises."""

from __future__ import annotations

import pytest

import accelcore
from accelcore.cli.doctor.diagnosis import diagnose

REQUESTS = ["auto", "cpu:0", "cpu:3", "cuda", "nowhere,CPU ", "?", "", "twin,cpu"]


@pytest.mark.parametrize("request_", REQUESTS)
def test_what_select_would_choose_is_what_it_chooses(machine, monkeypatch, request_):
    for distribution in ("red", "blue"):
        machine.fakes.install("", backends=["twin"], distribution=distribution)
    monkeypatch.setenv("ACCEL_DEVICE", request_)
    foreseen = diagnose().selection
    assert foreseen["request"] == (request_ or "auto")
    try:
        backend, error = accelcore.select(), None
    except accelcore.AccelError as raised:
        backend, error = None, raised
    if backend is not None:
        assert (foreseen["chosen"], foreseen["error"]) == (f"{backend.name}:{backend.index}", None)
        over = [(probe.name, probe.reason, probe.remedy) for probe in backend.passed_over]
        assert [tuple(passed.values()) for passed in foreseen["passed_over"]] == over
    else:
        assert foreseen["chosen"] is None
        told = (type(error).__name__, error.what, error.why, error.available, error.remedy)
        assert tuple(foreseen["error"].values()) == told


def test_a_rank_foresees_its_own_device(machine, monkeypatch):
    machine.fakes.backend("toaster", priority=9, count=2)
    for name, value in {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert diagnose().selection["chosen"] == "toaster:1"
    monkeypatch.setenv("RANK", "2")
    assert "RANK" in diagnose().selection["error"]["what"]


def test_a_device_variable_that_is_empty_is_not_set(machine):
    machine.variables["ACCEL_DEVICE"] = ""
    _, report, _ = machine.doctor()
    assert (report["selection"]["request"], report["selection"]["source"]) == ("auto", "default")
    assert report["selection"]["chosen"] == "cpu:0"


def test_a_device_that_cannot_be_had_is_exit_code_1(machine):
    for asked, code in (("cpu", 0), ("nowhere,cpu", 0), ("nowhere", 1), ("?", 1)):
        machine.variables["ACCEL_DEVICE"] = asked
        found, report, _ = machine.doctor()
        assert (found, report["broken"]) == (code, ["select()"] * code)

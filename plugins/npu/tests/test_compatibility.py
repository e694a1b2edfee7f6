from __future__ import annotations

import re

import pytest
from accelcore_npu import compatibility


def test_every_release_starts_with_the_torch_it_needs():
    for release in compatibility.RELEASES:
        assert compatibility.torch_of(release.torch_npu) == release.torch
        assert re.fullmatch(r"\d+\.\d+\.(RC)?\d+", release.cann)
    assert len({release.torch_npu for release in compatibility.RELEASES}) == len(compatibility.RELEASES)


def test_the_newest_come_first():
    def order(release):
        return [tuple(map(int, re.findall(r"\d+", version))) for version in (release.torch, release.cann)]

    found = [order(release) for release in compatibility.RELEASES]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(
    ("torch", "torch_npu"), [("2.13.0", "2.13.0"), ("2.9.0+cpu", "2.9.0.post2"), ("2.12.0", "2.12.0rc1")]
)
def test_those_of_one_release_fit(torch, torch_npu):
    assert compatibility.fault(torch, torch_npu, None) is None


@pytest.mark.parametrize(
    ("torch", "cann", "remedy"),
    [
        ("2.12.0", None, "torch-npu==2.12.0'"),
        ("2.12.0", "8.5.0", "torch-npu==2.12.0rc1'"),
        ("2.9.0+cpu", "9.0.0", "torch-npu==2.9.0.post2'"),
        ("2.14.1", None, "torch-npu==2.14.1.*'"),
    ],
)
def test_those_that_do_not_fit_are_named_with_what_would(torch, cann, remedy):
    reason, advice = compatibility.fault(torch, "2.13.0", cann)
    assert reason == f"torch-npu 2.13.0 is built for torch 2.13.0, and torch {torch} is installed"
    assert remedy in advice
    assert "torch==2.13.0" in advice


def test_what_is_not_published_is_not_claimed():
    assert compatibility.cann_of("2.12.0") == "9.1.0"
    assert compatibility.cann_of("2.13.0") is None

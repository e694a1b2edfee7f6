from __future__ import annotations

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import pytest

import accelcore
from accelcore import errors

ANCESTORS = {
    "AccelError": Exception,
    "AmpError": RuntimeError,
    "BackendUnavailableError": RuntimeError,
    "CheckpointError": RuntimeError,
    "ConfigurationError": ValueError,
    "DistributedError": RuntimeError,
    "PluginError": RuntimeError,
    "RecordingError": RuntimeError,
    "TrainingError": RuntimeError,
    "UnknownBackendError": LookupError,
    "UnsupportedError": NotImplementedError,
}


def test_the_family_is_complete():
    assert set(ANCESTORS) == set(errors.__all__)


@pytest.mark.parametrize(("name", "ancestor"), ANCESTORS.items())
def test_each_error_is_an_accel_error_and_its_builtin_kind(name, ancestor):
    kind = getattr(errors, name)
    assert issubclass(kind, errors.AccelError)
    assert issubclass(kind, ancestor)
    with pytest.raises(ancestor, match="broken"):
        raise kind("broken")


def test_the_message_says_what_why_what_is_available_and_what_to_do_in_this_order():
    error = errors.AccelError("it broke", remedy="mend it", available="glue", why="it fell")
    assert str(error) == "it broke\n  why: it fell\n  available: glue\n  what to do: mend it"
    assert (error.what, error.why, error.available, error.remedy) == ("it broke", "it fell", "glue", "mend it")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "it broke"),
        ({"why": "it fell"}, "it broke\n  why: it fell"),
        ({"available": "glue"}, "it broke\n  available: glue\n  what to do: choose glue"),
        ({"why": "it fell", "remedy": "mend it"}, "it broke\n  why: it fell\n  what to do: mend it"),
    ],
)
def test_a_part_that_is_not_known_is_left_out(parts, message):
    assert str(errors.AccelError("it broke", **parts)) == message


@pytest.mark.parametrize("name", ANCESTORS)
@pytest.mark.parametrize("duplicate", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_a_copy_of_an_error_says_the_same(name, duplicate):
    error = getattr(errors, name)("it broke", why="it fell", available="glue", remedy="mend it")
    twin = duplicate(error)
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert vars(twin) == vars(error)


def test_an_error_crosses_a_process_border():
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
        pytest.raises(errors.UnknownBackendError, match="there is no backend 'nowhere'") as caught,
    ):
        pool.submit(accelcore.select, "nowhere").result(timeout=60)
    assert "install its package" in caught.value.remedy

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from contextlib import nullcontext, suppress
from functools import cache
from importlib import import_module, invalidate_caches
from pathlib import Path

import forks
import pytest
import torch
from accelcore_cpu.backend import create

import accelcore
from accelcore import testing as suite
from accelcore.cli import main
from accelcore.cli import verify as command
from accelcore.roles.compiler import TorchCompiler
from accelcore.testing.support.options import ORACLES, options_of

HERE = Path(__file__).parent
sys.path.append(str(HERE))
lies = import_module("lies")
sys.path.remove(str(HERE))

FATAL = tuple(name for name, lie in lies.LIES.items() if lie.tell.__module__ == "lies.verify")
SWEPT = tuple(lies.operators.SWEPT)
READ_MEMORY = {"test_memory", "test_reading_keeps_the_peak"}
OF_TWO_RANKS = tuple(name for name, lie in lies.LIES.items() if lie.told_by)
INSTALLED = sorted({*FATAL, *(lies.LIES[name].told_by for name in OF_TWO_RANKS)})
WHOLE = ("TestPrecision.", "TestRuntime.", "TestScaler.")  # plugins/cpu/tests/test_conformance.py runs all of them
TRUE = {
    (lie.test, str(lie.arguments)): lie
    for name, lie in lies.LIES.items()
    if name not in (*FATAL, *SWEPT) and not lie.test.startswith(WHOLE)
}
"""A lie for each other test of the suite that lies are for, and its arguments."""
ONE_EACH = {lie.test: lie.name for lie in TRUE.values()}


@pytest.fixture
def liars(tmp_path, monkeypatch):
    """Lies that child processes tell, as installed backends."""
    metadata = tmp_path / "accelcore_lies-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: accelcore-lies\nVersion: 1.0\n")
    points = "\n".join(f"{name} = lies:{name}" for name in INSTALLED)  # of which every process asks each
    (metadata / "entry_points.txt").write_text(f"[accelcore.backends]\n{points}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(HERE))))
    monkeypatch.setenv("ACCEL_PROBE_TIMEOUT", "60")  # the lies import torch
    invalidate_caches()


@pytest.fixture(autouse=True)
def _settings_put_back():
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_autocast_dtype("cpu")
    stream = torch.cpu.stream(torch.cpu.current_stream())
    yield
    stream.__enter__()
    torch.set_float32_matmul_precision(precision)
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_dtype("cpu", dtype)
    torch.clear_autocast_cache()
    torch.autocast_increment_nesting()
    assert torch.autocast_decrement_nesting() == 0, "a lie left torch inside an autocast, for all tests to come"


def ask(lie, backend, request, told=nullcontext):
    """Run the test of the suite that must notice, on a backend."""
    kind, _, name = lie.test.partition(".")
    test = getattr(getattr(suite, kind)(), name)
    names = inspect.signature(test).parameters
    wanted = {
        fixture: request.getfixturevalue(fixture)
        for fixture in ("caplog", "record_property", "tmp_path")
        if fixture in names
    }
    with told():
        test(backend, **lie.arguments, **wanted)


def caught(lie, backend, request):
    """What the suite says of a lie: a failure in its own words, and not whatever a broken backend runs into."""
    with pytest.raises((AssertionError, pytest.fail.Exception, accelcore.AccelError)) as failure:
        ask(lie, backend, request, lie.around)
    return str(failure.value)


@pytest.mark.parametrize("name", [name for name in lies.LIES if name not in (*FATAL, *OF_TWO_RANKS, *SWEPT)])
def test_a_lie_is_caught_and_named(name, request):
    lie = lies.LIES[name]
    assert lie.says in caught(lie, lie.tell(create()), request)


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.full)])
def test_a_lie_of_an_operator_is_caught_and_named(every, request):
    """Many in one test: it takes longer to import torch's samples than to run some of them."""
    said = {name: caught(lies.LIES[name], create(), request) for name in SWEPT[::every]}
    assert {name: text for name, text in said.items() if lies.LIES[name].says not in text} == {}
    for name in said:
        ask(lies.LIES[name], create(), request)


@pytest.fixture
def forked(fork, monkeypatch):
    """The suite and its ranks are forks.

    Real processes: tests/examples/test_third_party.py.
    """
    monkeypatch.setattr("accelcore.util.child_process.subprocess", forks.in_place_of_subprocess(fork))


@pytest.mark.parametrize("name", OF_TWO_RANKS)
def test_a_lie_between_ranks_is_caught_and_named(name, liars, forked, request):
    assert lies.LIES[name].says in caught(lies.LIES[name], accelcore.select(lies.LIES[name].told_by), request)


# Each optimizer and each option once; that the others would show is in test_oracles.py, of every one.
IGNORED = [(name, option) for name in ORACLES for option in options_of(name)]
FIRST_OF_NAME = {name: (name, option) for name, option in reversed(IGNORED)}
FIRST_OF_OPTION = {option: (name, option) for name, option in reversed(IGNORED)}
ONE_IGNORED_EACH = {*FIRST_OF_NAME.values(), *FIRST_OF_OPTION.values()}


@pytest.mark.parametrize(
    ("name", "option"),
    [pytest.param(*each, marks=() if each in ONE_IGNORED_EACH else pytest.mark.full) for each in IGNORED],
)
def test_an_option_that_is_ignored_is_caught_and_named(name, option, request):
    lie = lies.Lie("ignored", None, "TestOptimizers.test_numerics", f"'{option}': ", {"name": name})
    assert lie.says in caught(lie, lies.optimizers.ignoring(name, option)(create()), request)


@pytest.mark.parametrize(
    ("option", "test", "says"),
    [
        ("init", "test_scale_is_on_the_device", "not the one that was asked for"),
        ("min", "test_endless_overflow_has_a_floor", "below its floor"),
        *((option, "test_growth", "as it was told") for option in ("growth", "backoff", "interval", "max")),
    ],
)
def test_a_scaler_that_ignores_an_option_is_caught_and_named(option, test, says, request):
    backend = lies.scaler.without(option)(create())
    assert says in caught(lies.Lie("ignored", None, f"TestScaler.{test}", says), backend, request)


def test_rounding_that_is_declared_passes(request):
    """A fast fp32 that does what its format says, on a device that has one."""
    backend = lies.precision.fast_by_rounding(create(), 10)
    for test in ("test_fast_fp32", "test_fp32_modes_nest", "test_ieee_fp32"):
        ask(lies.Lie("honest", None, f"TestPrecision.{test}", ""), backend, request)


def test_the_options_of_a_compiler_that_this_machine_lacks_are_not_tried():
    backend = dataclasses.replace(create(), compiler=TorchCompiler(lambda: "there is no g++"))
    with pytest.raises(pytest.skip.Exception, match="no g\\+\\+"):
        suite.TestCompiler().test_unknown_option(backend)


class Behind:
    """An event of a device that is behind its host until somebody waits for it."""

    waited = False

    def record(self, stream):
        type(self).waited = False

    def query(self):
        return self.waited


@pytest.mark.parametrize("waits", [True, False])
def test_a_synchronize_that_does_not_wait_is_caught(waits, monkeypatch, request):
    monkeypatch.setattr(torch.cpu, "Event", Behind, raising=False)
    honest = lies.lie.declaring(create(), streams=True)
    backend = lies.lie.replaced(honest, "runtime", synchronize=lambda honest: setattr(Behind, "waited", waits))
    asked = lies.Lie("waiting", None, "TestRuntime.test_synchronize", "")
    if waits:
        ask(asked, backend, request)
    else:
        assert "returned before the work was done" in caught(asked, backend, request)


# To compile C++ takes seconds: one test does in every run, and others trace what the compiler would be given.
IN_CPP = "TestCompiler.test_compiled_is_the_same"
OF_THE_COMPILER = [lie for lie in TRUE.values() if lie.test.startswith("TestCompiler.") and lie.test != IN_CPP]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(
            lie,
            id=lie.name,
            marks=[] if ONE_EACH[lie.test] == lie.name and lie not in OF_THE_COMPILER else pytest.mark.full,
        )
        for lie in TRUE.values()
    ],
)
def test_the_truth_passes(lie, request):
    """What catches a lie has nothing against the honest backend that the lie was made of."""
    torch.compiler.reset()  # what a lie has compiled is not what is asked
    with suppress(pytest.skip.Exception):
        ask(lie, accelcore.select("cpu"), request)


@pytest.mark.parametrize(
    "lie", [pytest.param(lie, id=lie.name) for lie in OF_THE_COMPILER if ONE_EACH[lie.test] == lie.name]
)
def test_the_truth_passes_without_cpp(lie, request):
    torch.compiler.reset()
    ask(lie, lies.compiler.traced(create()), request)


@pytest.fixture
def verify(capsys):
    """Run `accelcore verify backend` here, and the suite in its process: exit code, stdout, stderr."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "verify", cache(command.verify))
        yield lambda *arguments: (main(["verify", "backend", *arguments]), *capsys.readouterr())


def test_the_scorecard_is_whole_or_an_error(liars, forked, verify):
    code, out, err = verify("device_that_ends_the_process", "--only", "runtime", "--timeout", "30")
    assert (code, out) == (64, "")
    assert "could not be run" in err
    assert "Traceback" not in err


def test_the_scorecard_and_the_text_name_the_lie_and_the_lines(liars, forked, verify):
    code, out, err = verify("memory_that_cannot_be_read", "--only", "runtime", "--json")
    assert code == 1, err
    card = json.loads(out)
    assert card["conforms"] is False
    failures = {test["name"]: test for test in card["tests"] if test["outcome"] == "failed"}
    assert failures.keys() == READ_MEMORY
    failed = failures["test_memory"]
    assert "the driver cannot be asked" in failed["why"]
    line = inspect.getsource(lies.verify).splitlines().index('        raise OSError("the driver cannot be asked")') + 1
    first, *_, last = failed["where"]
    assert first.rpartition(":")[0].endswith("accelcore/testing/suite/runtime.py")
    assert last.endswith(f"lies/verify.py:{line}")
    assert 'raise OSError("the driver cannot be asked")' in failed["traceback"]
    assert all(
        test["where"] == [] and test["traceback"] == "" for test in card["tests"] if test["name"] not in failures
    )
    counts = card["roles"]["runtime"]
    assert counts["failed"] == len(failures)
    assert sum(counts.values()) == len(card["tests"])
    assert card["backend"]["name"] == "memory_that_cannot_be_read"
    assert card["backend"]["emulated"] is False

    for debug in ([], ["--debug"]):
        code, out, err = verify("memory_that_cannot_be_read", "--only", "runtime", *debug)
        assert code == 1, err
        assert "".join(f"    at {place}\n" for place in failed["where"]) in out
        assert ('raise OSError("the driver cannot be asked")' in out) == bool(debug), "the traceback, if asked for"


@pytest.mark.parametrize(
    ("name", "timeout", "said"),
    [
        ("device_that_crashes", "100", "SIGSEGV"),
        ("device_that_hangs", "5", "5 seconds"),
        ("device_that_is_lost", "100", "every call on cpu in this process fails (misaligned address)"),
    ],
)
def test_a_crash_or_a_hang_is_a_failure_of_its_test(name, timeout, said, liars, forked, verify):
    code, out, err = verify(name, "--only", "precision", "--timeout", timeout)
    assert code == 1, err
    assert f"{name} does not conform: 1 failed" in out
    assert "failed  precision: Autocast refuses any dtype" in out
    assert said in out
    assert "autocast to torch.int8" in out, "the tests behind it were not run"


def test_the_honest_backend_conforms(forked, verify):
    """Here and in a fork; in a process, as a user's, in tests/examples/test_third_party.py. The counts add up."""
    code, out, err = verify("cpu", "--only", "backend", "--only", "precision")
    assert code == 0, out + err
    assert out.endswith("\nthe tested part of cpu conforms\n")
    assert "\x1b" not in out
    counted = ("  backend ", "  precision ", "  all ")
    *parts, total = [list(map(int, line.split()[1:])) for line in out.splitlines() if line.startswith(counted)]
    assert all(sum(outcomes) == tests for *outcomes, tests in (*parts, total))
    assert [sum(column) for column in zip(*parts, strict=True)] == total
    assert f" of {total[-1]} tests  precision" in err, "nobody is told how far it is"


@pytest.mark.parametrize("name", ["auto", "cpu,cuda", "no_such_backend", "cpu:7", ""])
def test_what_cannot_be_verified_is_a_mistake(name, verify):
    code, out, err = verify(name)
    assert (code, out) == (64, "")
    assert err.startswith("accelcore: ")
    assert "Traceback" not in err

from __future__ import annotations

import shutil
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import accelcore
from accelcore.errors import PluginError, UnsupportedError

HOOKS = """
    from accelcore import Probe, hookimpl

    @hookimpl
    def accelcore_probe():
        return Probe({name!r}, available=True, count=1)

    @hookimpl
    def accelcore_create_backend(name, index):
        raise AssertionError("nobody asked for this backend")
"""
PROBE = """
    from accelcore import Probe, hookimpl

    @hookimpl
    def accelcore_probe():
        {answer}
"""
HANG = "import threading\nRELEASE = threading.Event()\n"

# What is wrong with a plugin: its code, the kind of the cause, and what the reason must say.
BROKEN = {
    "import raises ImportError": ("raise ImportError('no libdevice.so')", ImportError, "no libdevice.so"),
    "import raises KeyError": ("{}['DEVICE_HOME']", KeyError, "DEVICE_HOME"),
    "import raises SyntaxError": ("def broken(:", SyntaxError, "SyntaxError"),
    "import exits": ("import sys; sys.exit(3)", SystemExit, "it called sys.exit(3)"),
    "import is interrupted": ("raise KeyboardInterrupt", KeyboardInterrupt, "KeyboardInterrupt"),
    "no hooks at all": ("", PluginError, "accelcore_probe"),
    "misspelled hook": (
        HOOKS.format(name="broken") + "\n    @hookimpl\n    def accelcore_creat_backend(name): pass",
        Exception,
        "accelcore_creat_backend",
    ),
    "hook with another argument": (
        HOOKS.format(name="broken").replace("name, index", "name, number"),
        Exception,
        "accelcore_create_backend",
    ),
    "import raises a novel": ("raise ImportError('x' * 1_000_000)", ImportError, "xxx"),
    "import raises what cannot be said": (
        "class Mute(Exception):\n    def __str__(self): raise KeyError('mute')\nraise Mute",
        Exception,
        "Mute",
    ),
    "probe raises": (PROBE.format(answer="raise OSError('bus error')"), OSError, "bus error"),
    "probe exits": (PROBE.format(answer="raise SystemExit('bye')"), SystemExit, "bye"),
    "probe answers nothing": (PROBE.format(answer="return None"), PluginError, "Probe"),
    "probe answers rubbish": (PROBE.format(answer="return {'available': True}"), PluginError, "Probe"),
    "probe contradicts itself": (
        PROBE.format(answer="return Probe('broken', available=True, count=0)"),
        ValueError,
        "count is 0",
    ),
    "probe of the wrong types": (
        PROBE.format(answer="return Probe('broken', available=True, count='two')"),
        ValueError,
        "count is 'two'",
    ),
    "probe gives no reason": (PROBE.format(answer="return Probe('broken', available=False)"), ValueError, "reason"),
    "probe of another name": (
        PROBE.format(answer="return Probe('brokem', available=True, count=1)"),
        PluginError,
        "'brokem'",
    ),
    "probe of another interface": (
        PROBE.format(answer="return Probe('broken', available=True, count=1, api=99)"),
        PluginError,
        "interface 99, and this accelcore works with interface 1",
    ),
}


def ask_for(name):
    """The error of asking for this backend, after checking that its neighbours work as ever."""
    assert accelcore.select("cpu").name == "cpu"
    assert accelcore.installed()["cpu"].available
    with pytest.raises(PluginError) as caught:
        accelcore.select(name)
    return caught.value


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_plugin_harms_nobody_and_raises_from_its_cause_when_asked_for(fakes, fault):
    code, cause, says = BROKEN[fault]
    module = fakes.install(code, backends=["broken"])
    probe = accelcore.installed()["broken"]
    assert not probe.available
    assert says in probe.reason
    assert len(probe.reason) < 500
    assert module.replace("_", "-") in probe.remedy or probe.remedy == "install a newer accelcore"
    error = ask_for("broken")
    assert isinstance(error.__cause__, cause)
    assert error.why == probe.reason
    assert f"{module.replace('_', '-')} 1.0" in error.what
    assert accelcore.select("broken,cpu").passed_over[0].reason == probe.reason


@pytest.mark.parametrize("value", ["no_such_module_anywhere", "os:no_such_attribute", "os.path:", "!"])
def test_an_entry_point_that_leads_nowhere_is_a_broken_plugin(fakes, value):
    fakes.install("", backends=["lost"], value=value)
    assert not accelcore.installed()["lost"].available
    assert ask_for("lost").__cause__ is not None


@pytest.mark.parametrize(
    "code",
    [HANG + "RELEASE.wait()", HANG + PROBE.format(answer="RELEASE.wait()").replace("\n    ", "\n")],
    ids=["import", "probe"],
)
def test_a_plugin_that_hangs_is_given_up_in_time(fakes, monkeypatch, code):
    monkeypatch.setenv("ACCEL_PROBE_TIMEOUT", "0.3")
    module = fakes.install(code, backends=["sleepy"])
    assert accelcore.select("cpu").name == "cpu"
    assert module not in sys.modules, "a plugin nobody asked for was loaded"
    start = time.perf_counter()
    probes = accelcore.installed()
    assert 0.3 <= time.perf_counter() - start < 2
    assert probes["cpu"].available
    assert "ACCEL_PROBE_TIMEOUT" in probes["sleepy"].reason
    assert isinstance(ask_for("sleepy").__cause__, TimeoutError)


def test_plugins_that_hang_are_waited_for_together(fakes, monkeypatch):
    monkeypatch.setenv("ACCEL_PROBE_TIMEOUT", "0.5")
    names = [f"sleepy{index}" for index in range(6)]
    for name in names:
        fakes.install(HANG + "RELEASE.wait()", backends=[name])
    start = time.perf_counter()
    probes = accelcore.installed()
    assert time.perf_counter() - start < 1.5
    assert not any(probes[name].available for name in names)


def test_asking_again_for_a_plugin_whose_import_hangs_holds_no_second_thread(fakes, monkeypatch):
    monkeypatch.setenv("ACCEL_PROBE_TIMEOUT", "0.1")
    before = set(threading.enumerate())
    fakes.install(HANG + "RELEASE.wait()", backends=["sleepy"])
    for _ in range(5):
        accelcore.installed()
    started = [thread for thread in threading.enumerate() if thread not in before]
    for thread in started:
        thread.join(0.5)
    assert sum(thread.is_alive() for thread in started) == 1
    assert all(thread.daemon for thread in started), "a plugin that hangs would keep the program from ending"


def test_a_plugin_that_answers_late_is_taken_when_asked_again(fakes, monkeypatch):
    module = fakes.backend("tardy", before=HANG + "RELEASE.wait()")
    monkeypatch.setenv("ACCEL_PROBE_TIMEOUT", "0.2")
    assert not accelcore.installed()["tardy"].available
    sys.modules[module].RELEASE.set()
    monkeypatch.setenv("ACCEL_PROBE_TIMEOUT", "30")
    assert accelcore.select("tardy").name == "tardy"


def test_two_distributions_with_one_name_are_refused_naming_both(fakes):
    for distribution in ("red-plugin", "blue-plugin"):
        fakes.install(HOOKS.format(name="twin"), backends=["twin"], distribution=distribution)
    probe = accelcore.installed()["twin"]
    assert not probe.available
    assert probe.remedy == "uninstall one of them"
    error = ask_for("twin")
    assert "red-plugin 1.0" in str(error)
    assert "blue-plugin 1.0" in str(error)
    assert not set(fakes.modules) & set(sys.modules), "neither may win, so neither need be loaded"


def test_a_distribution_that_takes_the_name_of_a_real_backend_cannot_hijack_it(fakes):
    module = fakes.install(HOOKS.format(name="cpu"), backends=["cpu"], distribution="impostor")
    with pytest.raises(PluginError, match=r"accelcore-cpu .*impostor 1\.0|impostor 1\.0 .*accelcore-cpu"):
        accelcore.select("cpu")
    assert module not in sys.modules


def test_asking_for_one_backend_imports_no_other_plugin(fakes):
    module = fakes.backend("bystander", priority=1000)
    accelcore.select("cpu")
    assert module not in sys.modules
    accelcore.select("bystander")
    assert module in sys.modules


@pytest.mark.parametrize("request_", ["nowhere", "single:1", "absent", "rotten", "stubborn"])
def test_a_refused_request_imports_no_other_plugin_and_names_those_that_are_installed(fakes, request_):
    fakes.backend("single")
    fakes.backend("absent", available=False, count=0, reason="no such card", remedy="buy one")
    fakes.install("raise ImportError('no libdevice.so')", backends=["rotten"])
    fakes.backend("stubborn", create="raise OSError('no power')")
    module = fakes.backend("bystander", priority=1000)
    with pytest.raises(accelcore.AccelError) as caught:
        accelcore.select(request_)
    assert module not in sys.modules
    assert "bystander" in caught.value.available or request_ == "single:1"


def test_a_list_stops_at_the_first_that_works_and_imports_none_behind_it(fakes):
    module = fakes.backend("bystander")
    accelcore.select("cpu,bystander")
    assert module not in sys.modules


@pytest.mark.parametrize(
    ("current", "stated", "works", "newer"),
    [
        (2, {}, True, ""),
        (2, {"api": 1}, True, ""),
        (2, {"api": 2}, True, ""),
        (2, {"api": 3}, False, "accelcore"),
        (3, {}, False, "fake-plugin-"),
        (3, {"api": 1}, False, "fake-plugin-"),
        (3, {"api": 2}, True, ""),
    ],
)
def test_a_plugin_for_this_interface_or_the_one_before_works(fakes, monkeypatch, current, stated, works, newer):
    """One that does not say was written for the first, whatever this accelcore's is."""
    monkeypatch.setattr(accelcore.devices.hookspecs, "API", current)
    fakes.backend("timely", **stated)
    probe = accelcore.installed()["timely"]
    assert probe.available == works, probe.reason
    if not works:
        assert f"plugin interface {stated.get('api', 1)}, " in probe.reason
        assert f"works with interfaces {current - 1} and {current}" in probe.reason
        assert probe.remedy.startswith(f"install a newer {newer}")


def test_installed_is_sorted_by_name_and_gives_what_the_probe_said(fakes):
    fakes.backend("zulu", priority=3, count=2, exclusive=False)
    fakes.backend("alpha", available=False, count=0, reason="no card", remedy="buy one")
    probes = accelcore.installed()
    assert list(probes) == sorted(probes)
    assert {"alpha", "cpu", "cuda", "npu", "zulu"} <= set(probes)
    assert probes["zulu"] == accelcore.Probe("zulu", available=True, priority=3, count=2, exclusive=False)
    assert probes["alpha"].remedy == "buy one"


# Creating a backend.


@pytest.mark.parametrize(
    ("create", "cause"),
    [
        ("raise ImportError('libdevice.so.2')", ImportError),
        ("raise SystemExit(1)", SystemExit),
        ("raise KeyError('x')", KeyError),
        ("raise GeneratorExit", GeneratorExit),
        ("raise ImportError('x' * 1_000_000)", ImportError),
    ],
)
def test_a_backend_that_cannot_be_created_is_a_plugin_error_from_its_cause(fakes, create, cause):
    fakes.backend("stillborn", create=create)
    with pytest.raises(PluginError, match="could not create its backend") as caught:
        accelcore.select("stillborn")
    assert isinstance(caught.value.__cause__, cause)
    assert ("sys.exit(1)" if cause is SystemExit else cause.__name__) in caught.value.why
    assert "cpu" in caught.value.available.split(", ")
    assert len(str(caught.value)) < 2000
    assert accelcore.select("stillborn,cpu").name == "cpu"


def test_an_accelcore_error_of_the_plugins_own_reaches_the_user_as_it_is(fakes):
    fakes.backend(
        "picky",
        create="from accelcore import BackendUnavailableError\n"
        "                raise BackendUnavailableError('card 0 is busy', remedy='wait')",
    )
    with pytest.raises(accelcore.BackendUnavailableError, match="card 0 is busy") as caught:
        accelcore.select("picky")
    assert caught.value.remedy == "wait"
    assert accelcore.select("picky,cpu").name == "cpu"


@pytest.mark.parametrize("kind", ["UnsupportedError", "ConfigurationError"])
def test_no_error_of_a_plugins_own_keeps_a_list_from_its_next_choice(fakes, kind):
    create = f"import accelcore\n                raise accelcore.{kind}('not on this card')"
    fakes.backend("picky", create=create)
    with pytest.raises(getattr(accelcore, kind), match="not on this card"):
        accelcore.select("picky")
    backend = accelcore.select("picky,cpu")
    assert backend.name == "cpu"
    assert "not on this card" in backend.passed_over[0].reason


@pytest.mark.parametrize(
    "create",
    [
        "return None",
        "return 'backend'",
        "return 'x' * 1_000_000",
        "return type('Mute', (), {'__repr__': lambda self: 1 / 0})()",
        "index += 1",
        "name = 'cpu'",
    ],
)
def test_a_plugin_that_returns_something_else_than_was_asked_for_is_broken(fakes, create):
    fakes.backend("crooked", create=create, count=2)
    with pytest.raises(PluginError, match="was asked for crooked:0 and returned") as caught:
        accelcore.select("crooked")
    assert len(str(caught.value)) < 2000
    assert accelcore.select("crooked,cpu").name == "cpu"


def test_a_plugin_without_a_create_hook_is_broken(fakes):
    fakes.install(
        PROBE.format(answer="return Probe('hollow', available=True, count=1)"),
        backends=["hollow"],
    )
    with pytest.raises(PluginError, match="was asked for hollow:0 and returned None"):
        accelcore.select("hollow")


# Several at once.


def test_backends_selected_in_many_threads_at_once_all_work_and_load_a_plugin_once(fakes, tmp_path):
    count = tmp_path / "imports"
    fakes.backend("busy", before=f"with open({str(count)!r}, 'a') as file: file.write('x')")
    start = threading.Barrier(16)

    def work(_):
        start.wait()
        backend = accelcore.select("busy")
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = backend.optimizers.create("sgd", [weight], lr=0.5)
        weight.sum().backward()
        optimizer.step()
        return backend, weight.tolist()

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(work, range(16)))
    assert all(weight == [0.5, 0.5] for _, weight in results)
    assert len({id(backend) for backend, _ in results}) == 16
    assert count.read_text() == "x"


def test_backends_in_one_process_are_independent():
    one, other = accelcore.select("cpu"), accelcore.select("cpu")
    one.optimizers.register("lion", "mine", torch.optim.SGD)
    assert "lion" in one.optimizers.names()
    assert "lion" not in other.optimizers.names()
    with pytest.raises(UnsupportedError, match="no optimizer 'lion'"):
        other.optimizers.create("lion", [torch.nn.Parameter(torch.ones(2))])


def test_a_backend_is_frozen(accel):
    for name in ("name", "optimizers", "passed_over"):
        with pytest.raises(AttributeError):
            setattr(accel, name, None)


def test_asking_often_for_a_broken_plugin_makes_its_traceback_no_longer(fakes):
    fakes.install("raise ImportError('no libdevice.so')", backends=["rotten"])

    def frames():
        return len(traceback.extract_tb(ask_for("rotten").__cause__.__traceback__))

    first = frames()
    assert [frames() for _ in range(3)] == [first] * 3


def test_what_is_installed_or_removed_while_the_process_runs_is_noticed(fakes):
    """`select()` keeps what it has read of a folder's metadata while nothing is installed there."""
    site = Path(fakes.modules[fakes.backend("early")])
    assert "late" not in accelcore.installed()
    metadata = site / "late-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1.0\n")
    assert "late" not in accelcore.installed(), "pip is still writing"
    (metadata / "entry_points.txt").write_text("[accelcore.backends]\nlate = no_such_module\n")
    assert {"early", "late"} <= accelcore.installed().keys()
    shutil.rmtree(metadata)
    assert "early" in accelcore.installed()
    assert "late" not in accelcore.installed()

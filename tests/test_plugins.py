from __future__ import annotations

import contextlib
import logging
import sys
import textwrap
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

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
    "import exits": ("import sys; sys.exit(3)", SystemExit, "SystemExit: 3"),
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
    monkeypatch.setattr(accelcore.hookspecs, "API", current)
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
    assert cause.__name__ in caught.value.why
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


# Optimizers that a plugin, or an extension, brings.

REGISTER = """
    from accelcore import hookimpl

    @hookimpl
    def accelcore_register_optimizers(backend, registry):
        import torch

        {before}
        registry.register({name!r}, "theirs", torch.optim.SGD, priority=50)
"""


def parameter():
    return torch.nn.Parameter(torch.ones(2))


def test_a_backend_plugin_registers_its_own_optimizers(fakes):
    fakes.backend("gifted", after=REGISTER.format(name="lion", before=""))
    backend = accelcore.select("gifted")
    assert type(backend.optimizers.create("lion", [parameter()], lr=0.1).engine) is torch.optim.SGD
    assert "lion" not in accelcore.select("cpu").optimizers.names()


def test_a_backend_plugin_that_cannot_register_its_optimizers_is_broken(fakes):
    fakes.backend("clumsy", after=REGISTER.format(name="lion", before="raise KeyError('x')"))
    with pytest.raises(PluginError, match="could not register its optimizers") as caught:
        accelcore.select("clumsy")
    assert isinstance(caught.value.__cause__, KeyError)
    assert accelcore.select("clumsy,cpu").name == "cpu"


def test_what_creates_its_backend_for_long_is_named_in_the_log(fakes, monkeypatch, caplog):
    monkeypatch.setenv("ACCEL_PROBE_TIMEOUT", "0.2")
    fakes.backend("slow", before=HANG, create="RELEASE.wait(30)")

    class Release(logging.Handler):
        def emit(self, record):
            sys.modules[module].RELEASE.set()

    (module,) = fakes.modules
    handler = Release()
    logging.getLogger("accelcore").addHandler(handler)
    try:
        assert accelcore.select("slow").name == "slow"
    finally:
        logging.getLogger("accelcore").removeHandler(handler)
    assert "1.0 has been creating slow:0 for 1.2 seconds" in caplog.text


def test_a_backend_plugin_that_hangs_when_registering_is_given_up_in_time(fakes, monkeypatch):
    monkeypatch.setenv("ACCEL_PROBE_TIMEOUT", "0.3")
    fakes.backend("sluggish", before=HANG, after=REGISTER.format(name="lion", before="RELEASE.wait()"))
    start = time.perf_counter()
    with pytest.raises(PluginError, match="could not register its optimizers") as caught:
        accelcore.select("sluggish")
    assert time.perf_counter() - start < 2
    assert isinstance(caught.value.__cause__, TimeoutError)


def test_an_extension_adds_a_faster_route_to_somebody_elses_backend(fakes):
    fakes.install(REGISTER.format(name="adamw", before=""), extensions=["faster"])
    optimizers = accelcore.select("cpu").optimizers
    assert optimizers.explain("adamw")[0] == accelcore.roles.optimizers.Choice("theirs", chosen=True)
    assert type(optimizers.create("adamw", [parameter()], lr=0.1).engine) is torch.optim.SGD
    assert type(optimizers.create("adamw", [parameter()], lr=0.1, route="loop").engine) is torch.optim.AdamW


def test_an_extension_is_told_which_backend_it_extends(fakes):
    fakes.install(REGISTER.format(name="lion", before="if backend.name != 'host': return"), extensions=["choosy"])
    fakes.backend("host")
    assert "lion" in accelcore.select("host").optimizers.names()
    assert "lion" not in accelcore.select("cpu").optimizers.names()


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise ImportError('no libfast.so')", "no libfast.so"),
        ("raise SystemExit(3)", "SystemExit"),
        (REGISTER.format(name="lion", before="raise KeyError('x')"), "KeyError"),
        (REGISTER.format(name="lion", before="raise SystemExit(3)"), "SystemExit"),
        (REGISTER.format(name="lion", before="raise KeyError('x' * 1_000_000)"), "KeyError"),
        (REGISTER.format(name="adamw", before="registry.register('adamw', 'loop', None)"), "already has a route"),
    ],
)
def test_a_broken_extension_is_left_out_and_logged(fakes, caplog, code, says):
    fakes.install(code, extensions=["frail"])
    fakes.install(REGISTER.format(name="sturdy", before=""), extensions=["sturdy"])
    backend = accelcore.select("cpu")
    assert "sturdy" in backend.optimizers.names()
    assert "lion" not in backend.optimizers.names()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert says in record.getMessage()
    assert len(record.getMessage()) < 1000


@pytest.mark.parametrize("where", ["import", "register"])
def test_an_extension_that_hangs_is_left_out_in_time(fakes, monkeypatch, caplog, where):
    monkeypatch.setenv("ACCEL_PROBE_TIMEOUT", "0.3")
    register = textwrap.dedent(REGISTER.format(name="lion", before="RELEASE.wait()"))
    fakes.install(HANG + ("RELEASE.wait()" if where == "import" else register), extensions=["sleepy"])
    fakes.install(REGISTER.format(name="sturdy", before=""), extensions=["sturdy"])
    start = time.perf_counter()
    backend = accelcore.select("cpu")
    assert time.perf_counter() - start < 2
    assert "sturdy" in backend.optimizers.names()
    assert "lion" not in backend.optimizers.names()
    assert "ACCEL_PROBE_TIMEOUT" in caplog.text or "in time" in caplog.text


@pytest.mark.parametrize("late", [True, False], ids=["late", "raises"])
def test_what_a_failed_registration_registers_counts_for_nothing(fakes, monkeypatch, late):
    """Before it fails or after its time is up, in its registry or in its backend's."""
    monkeypatch.setenv("ACCEL_PROBE_TIMEOUT", "0.3")
    module = fakes.install(
        """
        import threading

        import torch

        from accelcore import hookimpl

        RELEASE, DONE = threading.Event(), threading.Event()

        @hookimpl
        def accelcore_register_optimizers(backend, registry):
            registry.register("early", "theirs", torch.optim.SGD)
            if not LATE:
                raise OSError("no power")
            RELEASE.wait()
            registry.register("adamw", "theirs", torch.optim.SGD, priority=50)
            backend.optimizers.register("lion", "theirs", torch.optim.SGD)
            DONE.set()
        """.replace("LATE:", f"{late}:"),
        extensions=["half"],
    )
    optimizers = accelcore.select("cpu").optimizers
    if late:
        sys.modules[module].RELEASE.set()
        assert sys.modules[module].DONE.wait(30)
    assert not {"early", "lion"} & set(optimizers.names())
    assert "theirs" not in [choice.route for choice in optimizers.explain("adamw")]


def test_an_extension_registers_on_the_callers_current_device(fakes, monkeypatch):
    """Each thread has a current device of its own, here as in torch.accelerator; select() changes nobody's."""
    current = threading.local()

    @contextlib.contextmanager
    def device_index(index):
        before, current.index = getattr(current, "index", 0), index
        yield
        current.index = before

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: getattr(current, "index", 0))
    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    before = "registry.register(f'on{torch.accelerator.current_device_index()}', 'theirs', torch.optim.SGD)"
    fakes.install(REGISTER.format(name="lion", before=before), extensions=["local"])
    with device_index(3):
        assert "on3" in accelcore.select("cpu").optimizers.names()
        assert current.index == 3


# Several at once.


def test_backends_selected_in_many_threads_at_once_all_work_and_load_a_plugin_once(fakes, tmp_path):
    count = tmp_path / "imports"
    fakes.backend("busy", before=f"with open({str(count)!r}, 'a') as file: file.write('x')")
    start = threading.Barrier(16)

    def work(_):
        start.wait()
        backend = accelcore.select("busy")
        weight = parameter()
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
        other.optimizers.create("lion", [parameter()])


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

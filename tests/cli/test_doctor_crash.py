"""Plugins that take their process down, block it or spoil its output."""

from __future__ import annotations

import os
import select
import signal
import subprocess

import pytest

from accelcore.cli.doctor import ask_plugins

NO_CORE = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\nimport os, signal\n"
SEGFAULT = "os.kill(os.getpid(), signal.SIGSEGV)"
CRASHES = {
    SEGFAULT: "the process was ended by SIGSEGV",
    "os.abort()": "the process was ended by SIGABRT, in File",
    "os._exit(0)": "the process ended with exit code 0",
}
PROBE = """
from accelcore import hookimpl
@hookimpl
def accelcore_probe():
    {}
"""
BLOCKED = "import ctypes; ctypes.PyDLL(None).sleep(1000)"  # the interpreter with it, threads and all
SELECT = "import accelcore; print(accelcore.select().name)"


def named(entries, name):
    (entry,) = (entry for entry in entries if entry["name"] == name)
    return entry


def test_backends_that_end_their_process_are_named_and_the_rest_is_shown_as_usual(machine):
    """Each way to end in one of two places, when the plugin is loaded or when it is probed."""
    places = {"loaded": "{}", "probed": PROBE}
    cases = {f"{list(places)[number % 2]}-{number}": crash for number, crash in enumerate(CRASHES)}
    for name, crash in cases.items():
        code = NO_CORE + places[name.partition("-")[0]].format(crash)
        machine.fakes.install(code, backends=[name], distribution=f"plugin-{name}")
    machine.fakes.install("raise KeyError('LICENSE_FILE')", backends=["odd"])
    machine.fakes.install("", extensions=["fine"])
    code, report, _ = machine.doctor()
    assert code == report["exit_code"] == 1
    for name, crash in cases.items():
        rotten = named(report["backends"], name)
        assert (rotten["state"], rotten["distribution"]) == ("broken", f"plugin-{name} 1.0")
        assert CRASHES[crash].split(", in File")[0] in rotten["reason"]
        assert f"repair or uninstall plugin-{name} 1.0" in rotten["remedy"]
        assert "ACCEL_DEVICE" in rotten["remedy"]
    assert report["usable"] == ["cpu"]
    assert report["broken"] == sorted(f"backend {name}" for name in [*cases, "odd"])
    assert "LICENSE_FILE" in named(report["backends"], "odd")["reason"]
    assert named(report["extensions"], "fine")["state"] == "loads"


def test_the_line_that_crashed_is_told(machine):
    module = machine.fakes.install(NO_CORE + PROBE.format("os.abort()"), backends=["rotten"])
    _, report, _ = machine.doctor()
    reason = named(report["backends"], "rotten")["reason"]
    assert reason.endswith("in accelcore_probe")
    assert f"{module}.py" in reason


def test_select_is_foreseen_to_crash_where_it_does_and_to_work_where_it_does(machine):
    """That it works where this is foreseen, test_doctor_select.py shows."""
    machine.fakes.install(NO_CORE + SEGFAULT, backends=["rotten"])
    _, report, text = machine.doctor()
    assert report["selection"]["chosen"] is None
    assert "SIGSEGV" in report["selection"]["error"]["why"]
    assert "would not return  ACCEL_DEVICE is not set" in text
    assert machine.python("-c", SELECT).returncode == -signal.SIGSEGV
    machine.variables["ACCEL_DEVICE"] = "cpu"
    code, report, _ = machine.doctor()
    assert (report["selection"]["chosen"], report["selection"]["error"]) == ("cpu:0", None)
    assert code == 1, "rotten is broken all the same"


def test_an_extension_that_ends_its_process_is_named(machine):
    machine.fakes.install(NO_CORE + "os._exit(3)", extensions=["faster"], distribution="faster-plugin")
    machine.fakes.install("raise KeyError('LICENSE_FILE')", extensions=["odd"])
    machine.variables["ACCEL_DEVICE"] = "cpu"
    code, report, _ = machine.doctor()
    assert code == 1
    assert report["broken"] == ["extension faster", "extension odd"]
    faster = named(report["extensions"], "faster")
    assert faster["reason"] == "while it was loaded, the process ended with exit code 3; every select() loads it"
    assert faster["remedy"] == "repair or uninstall faster-plugin 1.0"
    assert "LICENSE_FILE" in named(report["extensions"], "odd")["reason"]
    assert "exit code 3" in report["selection"]["error"]["why"]
    assert report["usable"] == ["cpu"]


def test_a_plugin_that_blocks_the_interpreter_is_killed(machine, monkeypatch):
    monkeypatch.setattr(ask_plugins, "_START", 2.0)
    monkeypatch.setenv("ACCEL_PROBE_TIMEOUT", "0.5")
    monkeypatch.setenv("ACCEL_DEVICE", "cpu")
    machine.fakes.install(BLOCKED, backends=["rotten"])
    answers = ask_plugins.ask_plugins()
    (rotten,) = (candidate for candidate in answers.candidates if candidate.name == "rotten")
    assert (
        rotten.probe.reason
        == "while it was loaded or probed, the process did not end within 2.5 seconds, and was killed"
    )


@pytest.mark.parametrize(
    ("number", "code", "says"), [(signal.SIGINT, 130, "accelcore: interrupted"), (signal.SIGTERM, 143, "")]
)
def test_no_process_is_left_when_doctor_is_interrupted(machine, number, code, says):
    fifo = machine.folder / "fifo"
    os.mkfifo(fifo)
    helper = f"import subprocess; fifo = open({str(fifo)!r}, 'w'); subprocess.Popen(['sleep', '1000'], stdout=fifo)"
    wait = "print('started', file=fifo, flush=True); import threading; RELEASE = threading.Event(); RELEASE.wait()"
    machine.fakes.install(f"{helper}\n{wait}", backends=["sleepy"])
    machine.variables["ACCEL_PROBE_TIMEOUT"] = "100"
    doctor = machine.start(
        "doctor", stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # these tests may run where Ctrl-C is ignored
    )  # fmt: skip
    with fifo.open() as held_by_the_child_and_its_helper:
        assert held_by_the_child_and_its_helper.readline() == "started\n"
        doctor.send_signal(number)
        out, err = doctor.communicate(timeout=60)
        assert (doctor.returncode, out, err.strip()) == (code, "", says)
        closed, _, _ = select.select([held_by_the_child_and_its_helper], [], [], 60)
        assert closed, "a process that holds it is still there"
        assert held_by_the_child_and_its_helper.read() == ""


def test_what_a_plugin_prints_or_leaves_running_disturbs_nothing(machine):
    left = "import threading; RELEASE = threading.Event(); threading.Thread(target=RELEASE.wait, daemon=False).start()"
    machine.fakes.backend("chatty", before=f"import os, sys\nprint('one')\nos.write(1, b'two')\n{left}")
    machine.no_torch()
    done = machine.run("doctor", "--json")
    assert done.returncode == 0
    assert done.stdout.startswith("{")
    assert "one" in done.stderr
    assert "two" in done.stderr


def test_no_file_in_the_working_directory_passes_for_a_package(machine):
    for name in ("json", "pluggy", "accelcore"):
        machine.write(f"{name}.py", "raise SystemExit('not the package')")
    machine.no_torch()
    as_the_console_script = "import sys; del sys.path[0]; from accelcore.cli import main; sys.exit(main(['doctor']))"
    done = machine.python("-c", as_the_console_script)
    assert (done.returncode, done.stderr) == (0, "")


def test_doctor_of_an_isolated_python_asks_in_an_isolated_python(machine):
    machine.module("sitecustomize", "import os; os._exit(7)")
    machine.variables["XDG_CACHE_HOME"] = str(machine.folder / "cache")  # else other tests have to try torch again
    done = machine.python("-I", "-m", "accelcore", "doctor")
    assert (done.returncode, done.stderr) == (0, "")

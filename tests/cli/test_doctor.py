from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

import accelcore
from accelcore.cli.doctor import deep
from accelcore.devices.plugins import AUTOLOAD, Declared
from accelcore.util.child_process import Ended

TORCH_FREE = """
import contextlib, io, sys
from accelcore.cli import main

with contextlib.redirect_stdout(io.StringIO()):
    code = main({arguments!r})
assert not {{"torch", "rich", "numpy"}} & set(sys.modules), "too much is imported"
sys.exit(code)
"""
UNDEFINED = "raise ImportError('/opt/vendor/libdevice.so: undefined symbol: _ZN2at4_ops')"
HIDE_EVERYTHING = """
from importlib.metadata import MetadataPathFinder
MetadataPathFinder.find_distributions = lambda *_: iter(())
"""
HANG = "import threading; RELEASE = threading.Event(); RELEASE.wait()"


def named(entries, name):
    (entry,) = (entry for entry in entries if entry["name"] == name)
    return entry


# Without --deep.


def test_on_a_sound_machine_it_says_what_works_and_what_does_not_and_exits_with_0(machine):
    """And what an issue report needs, in plain lines, and no secret."""
    machine.variables |= {"OMP_NUM_THREADS": "3", "HUB_TOKEN": "s3cret"}
    code, _, text = machine.doctor()
    assert code == 0
    assert re.search(r"^  cpu +usable +1 device, accelcore-cpu 0\.", text, re.M)
    for name, probe in accelcore.installed().items():
        if not probe.available:
            assert re.search(rf"^  {name} +not usable +accelcore-{name} 0\.", text, re.M)
            assert f"why: {probe.reason}" in text
            assert f"what to do: {probe.remedy}" in text
    assert "would choose cpu:0  ACCEL_DEVICE is not set, which means auto" in text
    assert text.rstrip().endswith("usable: cpu")
    assert "numpy " in text.splitlines()[0]
    assert f"{os.cpu_count()} cores" in text.splitlines()[1]
    assert re.search(r"import torch +works", text)
    assert "  OMP_NUM_THREADS='3'" in text.splitlines()
    assert "s3cret" not in text
    assert text.isascii()
    assert all(char.isprintable() or char == "\n" for char in text)


def test_the_json_has_these_fields(machine):
    code, report, _ = machine.doctor()
    assert code == report["exit_code"] == 0
    assert set(report) == {
        "schema", "exit_code", "usable", "broken", "versions", "platform", "executable", "misfits", "backends",
        "extensions", "selection", "environment", "unknown_variables", "autoload", "import_torch",
        "faults", "deep",
    }  # fmt: skip
    assert report["schema"] == 1
    assert (report["usable"], report["broken"], report["deep"]) == (["cpu"], [], None)
    for backend in report["backends"]:
        assert set(backend) == {
            "name", "state", "distribution", "reason", "remedy", "count", "priority", "versions", "misfits",
        }  # fmt: skip
    assert set(report["selection"]) == {"request", "source", "chosen", "why", "passed_over", "error"}
    assert report["versions"]["accelcore"] == accelcore.__version__
    assert report["versions"]["torch"].startswith("2.")
    assert report["executable"] == sys.executable


@pytest.mark.parametrize("arguments", [["doctor"], ["--version"]])
def test_it_imports_neither_torch_nor_what_only_a_terminal_needs(machine, arguments):
    machine.no_torch()
    done = machine.python("-c", TORCH_FREE.format(arguments=arguments))
    assert done.returncode == 0, done.stderr


def test_vendors_variables_and_distributions_come_from_the_plugins(machine):
    machine.variables["ASCEND_RT_VISIBLE_DEVICES"] = "2,3"
    machine.no_torch()  # it is imported, because another package declares to be loaded with it
    machine.torch_backend("pass")
    machine.fakes.backend("toaster", environment=("TOASTER_HOME",), distributions=("vendor-runtime", "gone"))
    _, report, text = machine.doctor()
    assert report["environment"]["ASCEND_RT_VISIBLE_DEVICES"] == "2,3"
    assert report["environment"]["TOASTER_HOME"] is None
    assert {"ACCEL_DEVICE", "RANK", "TORCH_DEVICE_BACKEND_AUTOLOAD", "CUDA_VISIBLE_DEVICES"} <= set(
        report["environment"]
    )
    assert named(report["backends"], "toaster")["versions"] == {"vendor-runtime": "2.0", "gone": None}
    assert "runtime: vendor-runtime 2.0" in text
    assert "ASCEND_RT_VISIBLE_DEVICES='2,3'" in text


def test_variables_that_nothing_reads_are_named_with_the_most_similar_one(machine):
    machine.fakes.backend("toaster", environment=("ACCEL_TOASTER_HEAT",))
    known = {"ACCEL_PROBE_TIMEOUT": "7", "ACCEL_KERNEL_CACHE": "/tmp", "ACCEL_TOASTER_HEAT": "3", "ACCEL_TRIAL": ""}
    machine.variables |= known | {"ACCEL_DEVCE": "cuda", "ACCEL_TOASTER_HEET": "3", "ACCEL_XYZ": "1"}
    _, report, text = machine.doctor()
    unknown = {"ACCEL_DEVCE": "ACCEL_DEVICE", "ACCEL_TOASTER_HEET": "ACCEL_TOASTER_HEAT", "ACCEL_XYZ": None}
    assert unknown.items() <= report["unknown_variables"].items()
    assert not known.keys() & report["unknown_variables"].keys()
    assert "ACCEL_DEVCE is set, and nothing installed reads it: did you mean ACCEL_DEVICE?" in text


@pytest.mark.parametrize("field", ["environment", "distributions"])
def test_a_probe_with_names_that_are_none_is_refused(field):
    for value in (["X"], ("X", 1), "X"):
        with pytest.raises(ValueError, match=field):
            accelcore.Probe("widget", available=True, count=1, **{field: value})


def test_broken_plugins_are_named_with_their_distributions_and_the_exit_code_is_1(machine):
    machine.variables["ACCEL_PROBE_TIMEOUT"] = "2"
    cases = {
        "rotten": (UNDEFINED, "undefined symbol"),
        "ends": ("raise SystemExit(3)", "it called sys.exit(3)"),
        "hangs": (HANG, "ACCEL_PROBE_TIMEOUT"),
    }
    modules = {name: machine.fakes.install(code, backends=[name]) for name, (code, _) in cases.items()}
    code, report, _ = machine.doctor()
    assert code == report["exit_code"] == 1
    for name, (_, says) in cases.items():
        backend = named(report["backends"], name)
        assert backend["state"] == "broken"
        assert says in backend["reason"]
        assert backend["distribution"] == f"{modules[name].replace('_', '-')} 1.0"
        assert modules[name].replace("_", "-") in backend["remedy"]
    assert named(report["backends"], "cpu")["state"] == "usable"
    assert report["broken"] == ["backend ends", "backend hangs", "backend rotten"]


def test_duplicates_are_broken_and_where_no_other_is_usable_the_exit_code_is_2(machine):
    machine.fakes.install("", backends=["cpu"], distribution="impostor")
    code, _, text = machine.doctor()
    assert code == 2
    assert "accelcore-cpu 0.1.0 and impostor 1.0" in text
    assert "uninstall one of them" in text
    assert "would raise BackendUnavailableError" in text
    assert "no backend is usable; broken: backend cpu" in text


def test_with_nothing_installed_it_says_what_to_install(machine):
    machine.module("sitecustomize", HIDE_EVERYTHING)
    machine.no_torch()
    done = machine.run("doctor")
    assert done.returncode == 2
    assert "no backend is installed" in done.stdout
    assert "none is installed: install accelcore-cpu" in done.stdout
    assert "torch not installed" in done.stdout


def test_an_extension_that_fails_is_broken(machine):
    machine.fakes.install("raise KeyError('LICENSE_FILE')", extensions=["faster"])
    machine.fakes.install(
        "from accelcore import hookimpl\n@hookimpl\ndef accelcore_register_optimizers(backend, registry): pass",
        extensions=["fine"],
    )
    code, report, text = machine.doctor()
    assert code == 1
    assert named(report["extensions"], "fine")["state"] == "loads"
    faster = named(report["extensions"], "faster")
    assert faster["state"] == "broken"
    assert "LICENSE_FILE" in faster["reason"]
    assert faster["remedy"].startswith("repair or uninstall fake-plugin")
    assert "broken: extension faster" in text


def test_what_a_plugin_says_can_neither_break_lines_nor_send_escape_codes(machine):
    machine.no_torch()
    machine.variables["PYTHONIOENCODING"] = "ascii"
    reason = "no \x1b[31mcard\r\n\tÄ"
    machine.fakes.backend("rude", available=False, count=0, reason=reason, remedy="buy one")
    done = machine.run("doctor")
    assert done.returncode == 0, done.stderr
    assert r"why: no \x1b[31mcard\r\n\t\xc4" in done.stdout


def test_an_invalid_variable_of_accelcore_is_an_error_without_traceback(machine):
    machine.variables["ACCEL_PROBE_TIMEOUT"] = "soon"
    done = machine.run("doctor")
    assert done.returncode == 64
    assert done.stderr.startswith("accelcore: ACCEL_PROBE_TIMEOUT='soon' is not a number of seconds")
    assert "Traceback" not in done.stderr


# What `import torch` does. A small package stands in for torch.


@pytest.fixture
def torch(machine):
    """The file of a torch that tells of each import; what doctor remembers is the test's own."""
    package = machine.folder / "site-of-torch" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"open({str(machine.folder / 'imports')!r}, 'a').write('.')\n")
    machine.sites.insert(0, str(package.parent))
    machine.variables["XDG_CACHE_HOME"] = str(machine.folder / "cache")
    return package / "__init__.py"


def imports_of(machine):
    """How many imports one call of doctor needs; it must say that torch works."""
    told = machine.folder / "imports"
    told.write_text("")
    code, report, _ = machine.doctor()
    assert (code, report["import_torch"]["outcome"]) == (0, "works")
    return len(told.read_text())


def test_an_import_of_torch_that_worked_is_not_tried_again_until_something_changes(machine, torch):
    assert [imports_of(machine) for _ in range(2)] == [1, 0]
    assert "it worked when it was tried before" in machine.doctor()[2]
    torch.write_text(torch.read_text() + "# another release\n")
    assert imports_of(machine) == 1
    (torch.parents[1] / "nvidia").mkdir()
    assert imports_of(machine) == 1
    machine.variables["LD_LIBRARY_PATH"] = "/opt/other/lib"
    assert [imports_of(machine) for _ in range(2)] == [1, 0]


def test_an_import_of_torch_that_fails_is_tried_each_time_and_said_first(machine, torch):
    assert imports_of(machine) == 1
    works = torch.read_text()
    torch.write_text(UNDEFINED)
    for _ in range(2):
        code, report, text = machine.doctor()
        assert (code, report["broken"]) == (1, ["import torch"])
        first = text.partition("backends")[0]
        assert re.search(r"import torch +failed", first)
        assert "undefined symbol" in first
    torch.write_text(works)
    assert imports_of(machine) == 1


def test_without_a_usable_cache_torch_is_tried_each_time(machine, torch):
    cache = machine.folder / "cache"
    cache.write_text("this is a file")
    assert [imports_of(machine) for _ in range(2)] == [1, 1]
    cache.unlink()
    assert [imports_of(machine) for _ in range(2)] == [1, 0]
    (memory,) = (cache / "accelcore" / "doctor").iterdir()
    for damaged in ("[[], {}]", memory.read_text()[:-9]):
        memory.write_text(damaged)
        assert imports_of(machine) == 1


# On a terminal.


@pytest.mark.parametrize("colours", [True, False])
def test_a_terminal_gets_colours_unless_they_are_unwanted(machine, colours):
    machine.no_torch()
    machine.variables |= {"TERM": "xterm-256color", "COLUMNS": "60"} | ({} if colours else {"NO_COLOR": "1"})
    ours, theirs = pty.openpty()
    child = machine.start("doctor", stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
    os.close(theirs)
    chunks = []
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(ours)
    assert child.wait() == 0
    text = b"".join(chunks).decode()
    assert ("\x1b[32m" in text or "\x1b[1;32m" in text) is colours
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "accelcore-cpu 0." in plain
    assert max(map(len, plain.splitlines())) <= 60


# With --deep. Where torch is not what is tried, an empty module stands in for it, which is quicker to import.


def test_a_trial_multiplies_and_updates_on_its_backend(machine, fork):
    """In a fork that has imported torch."""
    script = machine.write("attempt.py", "import sys\nfrom accelcore.cli.doctor import deep\nsys.exit(deep.main())\n")
    done = fork(script, "cpu").finish()
    assert done.returncode == 0, done.stderr
    assert "accelcore attempt: works" in done.stderr.splitlines()
    (notes,) = (line for line in done.stderr.splitlines() if line.startswith("accelcore notes: "))
    assert "kernels" in notes, "what the backend has logged"


@pytest.mark.full  # in a fork: above; what is made of how a process ends: below
def test_deep_imports_torch_and_multiplies_on_every_usable_backend(machine):
    code, report, _ = machine.doctor("--deep")
    assert code == 0
    deep = report["deep"]
    assert set(report["import_torch"]) == {"name", "notes", "outcome", "reason", "remedy", "seconds", "stderr"}
    assert report["import_torch"]["outcome"] == "works"
    assert {attempt["name"]: attempt["outcome"] for attempt in deep} == {
        "cpu": "works", "cuda": "not tried", "npu": "not tried",
    }  # fmt: skip
    assert "kernels" in " ".join(named(deep, "cpu")["notes"]), "what the backend has logged"


ENDS = {
    "segfault": (
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "crashed",
        "it was ended by SIGSEGV in File",
        "fit",
    ),
    "killed": (
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "crashed",
        "was ended by SIGKILL",
        "memory",
    ),
    "undefined_symbol": (
        UNDEFINED,
        "failed",
        "ImportError: /opt/vendor/libdevice.so: undefined symbol: _ZN2at4_ops",
        "built for",
    ),
    "missing_library": (
        "raise OSError('libhccl.so: cannot open shared object file')",
        "failed",
        "OSError: libhccl.so: cannot open shared object file",
        "a library is missing",
    ),
    "exit": ("import os; os._exit(5)", "failed", "it exited with 5 and wrote nothing", "stderr"),
    "exit_as_if_well": ("import os; os._exit(0)", "failed", "it exited with 0 and wrote nothing", "stderr"),
    "system_exit": ("raise SystemExit(0)", "failed", "it called sys.exit(0)", "stderr"),
}


def test_deep_reports_what_backends_do_to_their_processes(machine):
    machine.no_torch()
    for name, (create, *_) in ENDS.items():
        machine.fakes.backend(name, create=create)
    code, report, _ = machine.doctor("--deep")
    for name, (_, outcome, reason, remedy) in ENDS.items():
        attempt = named(report["deep"], name)
        assert attempt["outcome"] == outcome, name
        assert reason in attempt["reason"]
        assert remedy in attempt["remedy"]
        assert f"backend {name} (--deep)" in report["broken"]
        assert name not in report["usable"]
    assert code == 2, "nor does the CPU work with an empty torch"


def test_deep_gives_up_on_what_hangs_and_leaves_no_process(machine):
    machine.no_torch()
    pid = machine.folder / "pid"
    deaf = "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    machine.fakes.backend("sleepy", create=f"{deaf}; open({str(pid)!r}, 'w').write(str(os.getpid())); {HANG}")
    _, report, _ = machine.doctor("--deep", "--timeout", "4")
    attempt = named(report["deep"], "sleepy")
    assert attempt["outcome"] == "hung"
    assert "4 seconds" in attempt["reason"]
    assert "--timeout" in attempt["remedy"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_deep_with_a_broken_plugin_and_a_torch_that_cannot_be_imported(machine):
    machine.module("torch", UNDEFINED)
    code, _, text = machine.doctor("--deep")
    assert code == 1
    assert re.search(r"import torch +failed", text)
    assert "undefined symbol" in text
    assert "torch cannot be imported" in text
    assert "autoload" not in text.lower().replace("backend_autoload", "")


# What torch does with its entry points; with torch itself, in test_autoload.py and test_run.py.
AUTOLOADING = """
import os
if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
    import vendor_runtime
    vendor_runtime.autoload()
"""


def test_deep_tells_a_torch_backend_that_takes_import_torch_down(machine):
    machine.module("torch", AUTOLOADING)
    machine.torch_backend("raise ImportError('libascendcl.so: cannot open shared object file')")
    machine.fakes.backend(
        "toaster", available=False, count=0, reason="none", remedy="buy", distributions=("vendor-runtime",)
    )
    _, report, _ = machine.doctor("--deep")
    tried = report["import_torch"]
    assert tried["outcome"] == "failed"
    for words in ("works with TORCH_DEVICE_BACKEND_AUTOLOAD=0", "vendor = vendor_runtime:autoload", "libascendcl.so"):
        assert words in tried["reason"]
    for words in ("set TORCH_DEVICE_BACKEND_AUTOLOAD=0", "accelcore run", "uninstall vendor-runtime"):
        assert words in tried["remedy"]
    assert named(report["deep"], "cpu")["outcome"] == "failed", "the rest is examined all the same"
    assert "import torch" in report["broken"]


def test_deep_knows_no_way_around_a_runtime_that_is_nobodys(monkeypatch):
    """The children's words are stand-ins: what they come from is above."""

    def call(module, *, environ, limit):
        works = environ.get(AUTOLOAD) == "0"
        said = deep.WORKS if works else "ImportError: libascendcl.so: cannot open shared object file"
        return Ended(0 if works else 1, limit, 1.0, "", deep.SAYS + said)

    monkeypatch.setattr("accelcore.util.child_process.call", call)
    runtime = Declared("vendor", "vendor_runtime:autoload", "vendor-runtime", "2.0")
    torch, autoload_broken = deep.try_torch([], [runtime], 10.0)
    assert autoload_broken
    for words in ("set TORCH_DEVICE_BACKEND_AUTOLOAD=0", "uninstall vendor-runtime"):
        assert words in torch.remedy
    assert "accelcore run" not in torch.remedy


def test_an_import_of_torch_that_fails_is_reported_first(machine):
    machine.module("torch", AUTOLOADING)
    machine.torch_backend("raise ImportError('libascendcl.so: cannot open shared object file')")
    code, _, text = machine.doctor()
    assert code == 1
    first = text.partition("backends")[0]
    assert re.search(r"import torch +failed", first)
    for words in ("libascendcl.so", "vendor = vendor_runtime:autoload", "uninstall vendor-runtime"):
        assert words in first
    assert "would raise BackendUnavailableError" in text
    assert "broken: import torch" in text
    machine.variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    assert machine.doctor()[0] == 0


def test_it_tells_which_package_answers_for_a_device_of_torch(machine):
    torch = machine.folder / "site-of-torch" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("from . import xpu\nimport vendor_runtime\nvendor_runtime.autoload()\n")
    (torch / "xpu.py").write_text("def device_count(): return 0\n")
    machine.sites.insert(0, str(torch.parent))
    machine.torch_backend("import torch; torch.xpu.device_count = autoload")
    assert "torch.xpu is answered by vendor_runtime" in machine.doctor()[2]

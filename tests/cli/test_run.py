from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

import accelcore
from accelcore.cli import main

ECHO = """
import json, os, sys

print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "pid": os.getpid(),
    "device": os.environ.get("ACCEL_DEVICE"), "autoload": os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD"),
}))
sys.exit(7)
"""
STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
# Runs a command with os.execve replaced by one that prints what it is given.
PLANNED = """
import json, os, sys
from accelcore.cli import main

def execve(file, command, environ):
    print(json.dumps([file, command, environ]))
    sys.exit("torch" in sys.modules)

os.execve = execve
main({arguments!r})
"""


def echoed(done):
    assert done.returncode == 7, done.stderr
    return json.loads(done.stdout)


def test_a_script_gets_its_arguments_and_gives_its_exit_code(machine):
    script = machine.write("script.py", ECHO)
    told = echoed(machine.run("run", "script.py", "--device", "moon", "--help", "-m", "--", "x y"))
    assert told["argv"] == ["script.py", "--device", "moon", "--help", "-m", "--", "x y"]
    assert told["path"] == os.path.dirname(script)
    assert (told["name"], told["device"], told["autoload"]) == ("__main__", None, None)


def test_a_script_is_the_main_module_until_the_process_ends(machine):
    script = machine.write(
        "script.py",
        "import atexit, os, pickle\nclass Kept: pass\nos.chdir('/')\n"
        "atexit.register(lambda: print(type(pickle.loads(pickle.dumps(Kept()))).__name__, __file__))\n",
    )
    done = machine.run("run", "script.py")
    assert done.stdout.split() == ["Kept", os.path.realpath(script)], done.stderr


def test_a_module_runs_as_python_runs_it(machine):
    machine.module("tool", ECHO)
    told = echoed(machine.run("run", "--device", " NPU,cpu:0", "-m", "tool", "-m", "1"))
    assert told["argv"][0].endswith("tool.py")
    assert told["argv"][1:] == ["-m", "1"]
    assert told["device"] == " NPU,cpu:0"


def test_the_option_goes_before_the_variable_which_stays_without_it(machine):
    machine.write("script.py", ECHO)
    machine.variables["ACCEL_DEVICE"] = "npu"
    assert echoed(machine.run("run", "script.py"))["device"] == "npu"
    assert echoed(machine.run("run", "--device", "cpu", "script.py"))["device"] == "cpu"
    machine.variables["ACCEL_DEVICE"] = ""
    assert echoed(machine.run("run", "script.py"))["device"] == "", "empty means unset"


@pytest.mark.parametrize(("asked", "nproc"), [("auto,cpu", "2"), ("moon", "1")])
def test_a_variable_that_is_no_device_is_found_before_the_script_starts(machine, asked, nproc):
    machine.write("script.py", "raise AssertionError('it was started')")
    machine.variables["ACCEL_DEVICE"] = asked
    done = machine.run("run", "--nproc", nproc, "script.py")
    assert done.returncode == 64
    assert f"ACCEL_DEVICE={asked!r}" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_script_is_the_process_so_its_signals_are_its_own(machine):
    machine.write("script.py", "import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()\n")
    child = machine.start("run", "script.py", stdout=subprocess.PIPE)
    assert int(child.stdout.readline()) == child.pid
    child.terminate()
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("arguments", "launcher"),
    [
        ([], []),
        (["--nproc", "1"], []),
        (["--nproc", "2"], ["--nproc-per-node", "2", "--max-restarts", "0"]),
        (["--nproc", "3", "--max-restarts", "4"], ["--nproc-per-node", "3", "--max-restarts", "4"]),
        (["--max-restarts", "1"], ["--nproc-per-node", "1", "--max-restarts", "1"]),
    ],
)
def test_torch_is_not_imported_and_its_launcher_only_used_where_it_has_work(machine, arguments, launcher):
    machine.write("script.py", "")
    program = PLANNED.format(arguments=["run", *arguments, "script.py", "--nproc", "9"])
    done = machine.python("-c", program)
    assert done.returncode == 0, done.stderr
    file, command, environ = json.loads(done.stdout)
    front = [file, "-m", "accelcore.cli.launcher", "--standalone", *launcher, "--no-python", "--"] if launcher else []
    assert command[: len(front)] == front
    python, *options = command[len(front) : -3]
    assert (python, options[0] == "-u") == (file, bool(launcher))
    assert command[-3:] == ["script.py", "--nproc", "9"]
    assert environ.get(STORES) == ("1" if "--max-restarts" in arguments else None)


def test_torchruns_options_for_several_machines_are_handed_on(machine):
    machine.write("script.py", "")
    options = ["--nproc", "4", "--rdzv-endpoint", "node0:29400", "--node-rank", "2", "--nnodes", "3"]
    done = machine.python("-c", PLANNED.format(arguments=["run", *options, "script.py", "--nnodes", "9"]))
    assert done.returncode == 0, done.stderr
    _, command, _ = json.loads(done.stdout)
    text = " ".join(command)
    assert "launcher --nnodes 3 --node-rank 2 --rdzv-endpoint node0:29400 --nproc-per-node 4 --max-restarts 0 " in text
    assert "--standalone" not in text
    assert command[-3:] == ["script.py", "--nnodes", "9"]


def test_what_the_user_says_of_the_launchers_stores_stands(machine):
    machine.write("script.py", "")
    machine.variables[STORES] = "0"
    done = machine.python("-c", PLANNED.format(arguments=["run", "--max-restarts", "1", "script.py"]))
    assert json.loads(done.stdout)[2][STORES] == "0"


@pytest.mark.parametrize(
    ("options", "given", "threads"),
    [
        (["--nproc", "4"], None, "2"),
        (["--nproc", "12"], None, "1"),
        (["--nproc", "4"], "7", "7"),
        ([], None, None),
        (["--max-restarts", "1"], None, None),
    ],
)
def test_ranks_share_the_cores_unless_the_user_says_how(machine, monkeypatch, options, given, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        machine.variables["OMP_NUM_THREADS"] = given
    machine.write("script.py", "")
    cores = "import os\nos.sched_getaffinity = lambda process: range(11)\n"
    done = machine.python("-c", cores + PLANNED.format(arguments=["run", *options, "script.py"]))
    assert json.loads(done.stdout)[2].get("OMP_NUM_THREADS") == threads


# Mistakes.


@pytest.fixture
def here(machine, monkeypatch):
    """The command line runs in this process and may start no other."""
    machine.write("script.py", "")
    monkeypatch.chdir(machine.folder)
    for start in ("os.execve", "subprocess.Popen"):
        monkeypatch.setattr(start, lambda *_, **__: pytest.fail("something was started"))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--device", "cuda:-1", "script.py"], "--device='cuda:-1' is not a device"),
        (["run", "--device", "", "missing.py"], "there is no script 'missing.py'"),  # counts as unset
        (["run", "--device", "cppu", "--nproc", "2", "script.py"], "--device='cppu': there is no backend 'cppu'"),
        (["run", "--device", "cpu:3", "script.py"], "--device='cpu:3': there is no device cpu:3"),
        (["run", "--device", "cpu:3", "--nproc", "2", "script.py"], "choose cpu:0"),
        (["run", "missing.py"], "there is no script 'missing.py'"),
        (["run", "skript.py"], "did you mean script.py? Else"),
        (["run", "."], "there is no script '.'"),
        (["replay", "ref", "--steps", "4", "script.py"], "write options of accelcore before the first argument"),
        (["run", ""], "there is no such file, seen from"),
        (["run", "--nproc", "two", "script.py"], "'two' is not a valid number of ranks"),
        (["run", "-"], "there is no script '-'"),
        (["run", "--nproc", "0", "script.py"], "--nproc"),
        (["run", "--nnodes", "2", "script.py"], "--nnodes cannot be used without --rdzv-endpoint or --master-addr"),
        (["run", "--rdzv-endpoint", "a:1", "script.py"], "--rdzv-endpoint cannot be used without --nnodes"),
        (["run", "--nnodes", "2", "--master-addr", "a", "script.py"], "without --node-rank"),
        (["run", "--devise", "cpu", "script.py"], "--device"),
        (["run"], "SCRIPT"),
        (["doctor", "--devices", "2"], "Did you mean '--deep'?"),
        (["run", "-m", "nothing.main"], "there is no module 'nothing.main'"),
        (["run", "-m", ""], "there is no module ''"),
        (["sing"], "sing"),
        (["doctor", "--timeout", "0"], "--timeout"),
    ],
)
def test_a_mistake_is_one_error_without_traceback_before_anything_starts(capsys, arguments, says):
    assert main(arguments) == 64
    out, err = capsys.readouterr()
    assert says in err
    assert out == ""
    assert "Traceback" not in err


def test_debug_shows_where_a_mistake_was_found(machine):
    for arguments in (["--debug", "run", "--device", "?", "x.py"], ["run", "--device", "?", "--debug", "x.py"]):
        done = machine.run(*arguments)
        assert done.returncode == 64
        assert "Traceback" in done.stderr
        assert "ConfigurationError: --device='?' is not a device" in done.stderr


# torch's autoload.


@pytest.fixture
def unusable(machine):
    """A runtime that `import torch` loads and that raises, and the plugin that knows it cannot work here."""
    machine.torch_backend("raise ImportError('libascendcl.so: cannot open shared object file')")
    machine.fakes.backend(
        "toaster", available=False, count=0, reason="no toaster", remedy="buy one", distributions=("Vendor_Runtime",)
    )


# What torch does with its entry points, in a module that is quicker to import.
AUTOLOADING = """
import os
if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
    import vendor_runtime
    vendor_runtime.autoload()
"""


@pytest.mark.usefixtures("unusable")
@pytest.mark.parametrize("stand_in", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_script_that_imports_torch_first_is_kept_from_a_runtime_that_cannot_work(machine, stand_in):
    if stand_in:
        machine.module("torch", AUTOLOADING)
    machine.write("script.py", "import torch; print('torch is here')")
    done = machine.run("run", "script.py")
    assert (done.returncode, done.stdout) == (0, "torch is here\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("accelcore: TORCH_DEVICE_BACKEND_AUTOLOAD=0 for this run, because")
    assert "vendor = vendor_runtime:autoload (vendor-runtime 2.0), and toaster is not usable here: no toaster" in line
    assert line.endswith("; vendor_runtime is hidden from it")


LOOKS = """
from importlib.util import find_spec
print(find_spec("vendor_runtime"))
try:
    import vendor_runtime
except ImportError as error:
    print(type(error).__name__)
"""


@pytest.mark.usefixtures("unusable")
def test_a_library_that_looks_for_that_runtime_is_told_that_it_is_not_installed(machine):
    machine.write("script.py", LOOKS + ECHO)
    *seen, told = machine.run("run", "script.py", "-m", "--x").stdout.splitlines()
    assert seen == ["None", "ModuleNotFoundError"]
    told = json.loads(told)
    assert (told["argv"], told["name"]) == (["script.py", "-m", "--x"], "__main__")
    assert told["path"] == os.path.dirname(machine.write("other.py", ""))
    machine.module("tool", LOOKS + ECHO)
    *seen, told = machine.run("run", "-m", "tool", "-m").stdout.splitlines()
    assert seen == ["None", "ModuleNotFoundError"]
    assert json.loads(told)["argv"][0].endswith("tool.py")
    assert json.loads(told)["argv"][1:] == ["-m"]


@pytest.mark.usefixtures("unusable")
@pytest.mark.parametrize("value", ["0", "1", ""])
def test_what_the_user_says_of_autoload_stands(machine, value):
    machine.write("script.py", ECHO)
    machine.variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = value
    done = machine.run("run", "script.py")
    assert echoed(done)["autoload"] == value
    assert done.stderr == ""


@pytest.mark.parametrize("distributions", [("vendor-runtime",), ()])
def test_autoload_stays_on_where_the_backend_works_or_nobody_knows_the_runtime(machine, distributions):
    machine.write("script.py", ECHO)
    machine.torch_backend("pass")
    machine.fakes.backend("toaster", distributions=distributions)
    machine.fakes.backend("oven", available=False, count=0, reason="none", remedy="buy one", distributions=("other",))
    done = machine.run("run", "script.py")
    assert echoed(done)["autoload"] is None
    assert done.stderr == ""


# Several ranks, by torch's launcher. Those that meet are in test_restarts.py and, without restarts, in test_apex.py;
# those that fail, in test_failed_ranks.py.


def test_restarts_start_a_dead_rank_again(machine, launch):
    machine.write(
        "train.py",
        "import os\nn = os.environ['TORCHELASTIC_RESTART_COUNT']\nos.write(1, f'{n} '.encode())\nos._exit(n == '0')",
    )
    done = launch("--max-restarts", 1, "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize("module", [True, pytest.param(False, marks=pytest.mark.full)])
def test_ranks_end_with_a_launcher_that_is_killed(machine, module):
    machine.module(
        "train",
        "import os, signal, sys\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['--nproc', '9']\n"
        "os.write(1, b'.\\n')\n"
        "signal.alarm(90)\n"
        "signal.pause()\n",
    )
    script = ["-m", "train"] if module else [f"{machine.sites[0]}/train.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    launcher = machine.start("run", "--nproc", "2", *script, "--nproc", "9", **pipes)
    assert [launcher.stdout.readline(), launcher.stdout.readline()] == [".\n", ".\n"]
    launcher.kill()
    rest, _ = launcher.communicate(timeout=60)  # which ends when no rank holds the other end of the pipe
    assert (launcher.returncode, rest) == (-signal.SIGKILL, "")


# Emulation.


TOASTER = """
from accelcore import hookimpl

@hookimpl
def accelcore_emulate(name, devices):
    return {"TOASTER": f"{name} of {devices} devices"} if name == "toaster" else None
"""
SAYS = "import os; print(os.environ.get('TOASTER'), os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD'))"


def test_an_emulation_is_an_environment_that_a_distribution_of_its_own_prepares(machine):
    machine.torch_backend("pass")
    machine.fakes.backend(
        "toaster", available=False, count=0, reason="no toaster", remedy="buy one", distributions=("vendor-runtime",)
    )
    machine.fakes.install(TOASTER, emulators=["toaster"])
    machine.write("script.py", SAYS)
    done = machine.run("run", "--emulate", "toaster", "script.py")
    assert (done.returncode, done.stdout) == (0, "toaster of 1 devices None\n")
    assert done.stderr == "accelcore: EMULATED: toaster is imitated on the host; its speed and numerics prove nothing\n"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("kettle", "no installed package emulates a backend of that name"),
        ("kettle", "silent, toaster, twice), or remove --emulate"),
        ("toaster:0", "name one backend without an index"),
        ("?", "--emulate '?': no installed package"),
        ("broken", "the emulator of 'broken' (fake-plugin-"),
        ("broken", "a part is missing"),
        ("twice", "two distributions offer an emulation of 'twice'"),
        ("silent", "does not answer accelcore_emulate"),
    ],
)
def test_what_cannot_be_emulated_is_a_mistake(machine, capsys, name, says):
    machine.fakes.install(TOASTER, emulators=["toaster", "twice", "silent"])
    machine.fakes.install(TOASTER, emulators=["twice"])
    machine.fakes.install("raise ImportError('a part is missing')", emulators=["broken"])
    assert main(["run", "--emulate", name, "script.py"]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert "Traceback" not in err


def test_what_can_be_emulated_is_listed(machine):
    machine.fakes.install(TOASTER, emulators=["toaster"])
    machine.write("script.py", SAYS)
    done = machine.run("run", "--emulate", "kettle", "script.py")
    (line,) = [line for line in done.stderr.splitlines() if "available: " in line]
    assert "toaster" in line.split(": ")[1].split(", ")


def test_nobody_loads_an_emulator_unasked(machine):
    machine.no_torch()
    machine.fakes.install("raise SystemExit('it was loaded')", emulators=["toaster", "cpu"])
    machine.write("script.py", "import accelcore; accelcore.installed()")
    for command in (["run", "script.py"], ["doctor"]):
        done = machine.run(*command)
        assert done.returncode == 0, done.stderr
        assert "it was loaded" not in done.stdout + done.stderr
    assert accelcore.select("cpu").name == "cpu"  # here: nor does a process that selects a device

"""What a user sees where ranks of `accelcore run` fail: their traceback once, a sentence on which it was, no more."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from accelcore.cli.failed_ranks import Failure, said_of
from accelcore.failure_report import FailureReport

REMEDY = "\n  what to do: "


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    """What torch's launcher says where nobody has set it is among what must not be seen."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


# `accelcore run`, in a process that has imported torch: the launcher that it would become runs there.
LAUNCH = """
import os, runpy, sys
from accelcore.cli import main

def execve(file, command, environ):
    assert command[1:3] == ["-m", "accelcore.cli.launcher"]
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = command[2:]
    runpy.run_module(command[2], run_name="__main__", alter_sys=True)

os.execve = execve
main(["run", "--device", "cpu", "--nproc", "2", "train.py"])
"""


@pytest.fixture
def run(machine, fork, monkeypatch):
    """A script on two ranks, with a launcher in a fork: what that returned, and what it and its ranks wrote."""

    def run(code):
        machine.write("train.py", code)
        monkeypatch.chdir(machine.folder)
        done = fork(machine.write("launch.py", LAUNCH), **machine.environ).finish()
        assert "ChildFailedError" not in done.stderr
        assert "torch/distributed/run.py" not in done.stderr
        assert "OMP_NUM_THREADS" not in done.stderr
        return done.returncode, done.stderr

    return run


def test_a_rank_that_raises_is_heard_once_and_first_and_those_that_it_takes_along_are_not(run):
    code, said = run(
        "import torch, accelcore\n"
        "with accelcore.select().distributed() as job:\n"
        "    accelcore.select()\n"  # once more, when torch has put its own hook around ours
        "    if job.rank == 1: raise ValueError('rank 1 gives up')\n"
        "    job.all_reduce(torch.ones(1))\n",
    )
    *traceback, sentence, remedy = said.splitlines()
    assert code == 1
    assert sentence == "accelcore: the job ended because rank 1 failed with exit code 1: ValueError: rank 1 gives up"
    assert remedy == "  what to do: see the traceback above"
    assert traceback[0] == "[rank1]: Traceback (most recent call last):"
    assert traceback[-1] == "[rank1]: ValueError: rank 1 gives up"
    assert all(line.startswith("[rank1]: ") for line in traceback), said


@pytest.mark.parametrize(
    "code",
    [
        (
            "with accelcore.select().distributed() as job:\n"
            "    if job.rank == 1: raise ValueError('rank 1 gives up')\n"
            "    try: job.all_reduce(torch.ones(1))\n"
            "    except RuntimeError as error: raise KeyError('the sum') from error\n"
        ),
        (
            "try:\n"
            "    with accelcore.select().distributed() as job:\n"
            "        if job.rank == 1: raise ValueError('rank 1 gives up')\n"
            "        job.all_reduce(torch.ones(1))\n"
            "except accelcore.DistributedError as error: raise KeyError('the job') from error\n"
        ),
        (
            "with accelcore.select().distributed() as job:\n"
            "    if job.rank == 1: raise ValueError('rank 1 gives up')\n"
            "    try: job.all_reduce(torch.ones(1))\n"
            "    finally: {}['in the handling of it']\n"
        ),
    ],
    ids=["inside the job", "around it", "in the handling of it"],
)
def test_an_error_that_is_raised_from_a_collectives_is_not_heard_either(run, code):
    code, said = run(f"import torch, accelcore\n{code}")
    assert code == 1
    assert said.count("Traceback") == 1, said
    assert said.splitlines()[-2].endswith("because rank 1 failed with exit code 1: ValueError: rank 1 gives up")


def test_a_rank_that_loses_another_in_a_job_that_it_has_joined_is_not_heard_either(run):
    """Nor does it say at exit, once more, who has failed."""
    code, said = run(
        "import torch, accelcore\n"
        "job = accelcore.select().join()\n"
        "accelcore.select()\n"
        "if job.rank == 1: raise ValueError('rank 1 gives up')\n"
        "job.all_reduce(torch.ones(1))\n",
    )
    *traceback, sentence, _ = said.splitlines()
    assert code == 1
    assert sentence.endswith("because rank 1 failed with exit code 1: ValueError: rank 1 gives up")
    assert all(line.startswith("[rank1]: ") for line in traceback), said


def test_a_script_that_ends_itself_when_a_collective_fails_has_its_exit_code(run):
    code, said = run(
        "import sys, torch, accelcore\n"
        "with accelcore.select().distributed() as job:\n"
        "    if job.rank == 1: sys.exit(8)\n"
        "    try: job.all_reduce(torch.ones(1))\n"
        "    except RuntimeError: sys.exit(7)\n",
    )
    assert code in (7, 8)
    assert "Traceback" not in said


def test_ranks_that_fail_alike_are_heard_once(machine, run):
    os.mkfifo(machine.folder / "meeting")
    code, said = run(
        "import accelcore, atexit, os\n"
        # Each waits for the other, when its error has been reported: else the launcher may end one before that.
        "atexit.register(lambda: open('meeting', 'w' if os.environ['RANK'] == '0' else 'r').close())\n"
        "accelcore.select('nothing')\n",
    )
    assert code == 1
    assert said.count("Traceback") == 1
    assert said.count("there is no backend 'nothing'\n  why: ") == 1
    assert said.splitlines()[-2].startswith(
        "accelcore: the job ended because ranks 0 and 1 failed alike with exit code 1: UnknownBackendError: device="
    )


@pytest.mark.parametrize(
    ("code", "shown", "sentence"),
    [
        ("import not_installed", "ModuleNotFoundError: No module named 'not_installed'", "No module named 'not_inst"),
        ("if True print()", "SyntaxError: ", "SyntaxError: "),
    ],
)
def test_ranks_that_fail_before_they_use_accelcore_are_heard_once(run, code, shown, sentence):
    code, said = run(code)
    assert code == 1
    assert said.count(shown) == 2, said  # once above, and in the sentence
    assert said.count('train.py", line 1') == 1
    assert sentence in said.splitlines()[-2]
    assert said.splitlines()[-2].startswith("accelcore: the job ended because rank")


def test_a_rank_has_the_machines_own_sitecustomize_and_hands_on_its_environment_as_it_was(machine, run):
    machine.module("sitecustomize", "import sys\nsys.customized = sys.modules[__name__].__file__")
    code, said = run(
        "import os, subprocess, sys\n"
        "if os.environ['RANK'] == '0':\n"
        "    tell = 'import sys; print(sys.customized, sys.path[1:], sys.excepthook is sys.__excepthook__)'\n"
        "    child = subprocess.run([sys.executable, '-c', tell], capture_output=True, text=True).stdout\n"
        "    assert child.split(maxsplit=1)[0] == sys.customized == sys.modules['sitecustomize'].__file__\n"
        "    assert child.rstrip().endswith(f'{sys.path[1:]} True'), (child, sys.path)\n"
        "    assert not any('at_start' in value for value in [*os.environ.values(), *sys.path])\n",
    )
    assert (code, said) == (0, "")


def test_a_hook_of_the_scripts_own_is_called_and_the_rank_reports(run):
    """One that replaces ours before the backend is chosen, and calls none."""
    code, said = run(
        "import sys, os, signal\n"
        "if os.environ['RANK'] == '1': signal.pause()\n"
        "sys.excepthook = lambda kind, error, trace: print('own hook', file=sys.stderr)\n"
        "import accelcore\n"
        "accelcore.select('nothing')\n",
    )
    assert code == 1
    assert said.startswith("own hook\naccelcore: the job ended because rank 0 failed with exit code 1: UnknownBackend")


def test_what_a_rank_starts_is_heard_itself(run):
    """It has the rank's environment, and its failure is no rank's."""
    child = "import accelcore; accelcore.select('nothing')"
    code, said = run(
        "import os, signal, subprocess, sys\n"
        "if os.environ['RANK'] == '1': signal.pause()\n"  # until the launcher ends it
        f"done = [subprocess.run([sys.executable, '-c', {child!r}]) for _ in range(2)]\n"
        "sys.exit(7 if all(one.returncode == 1 for one in done) else 8)\n",
    )
    assert (code, said.count("Traceback")) == (7, 2)
    assert "accelcore: the job ended because rank 0 ended with exit code 7\n" in said


@pytest.mark.parametrize(
    ("end", "code", "sentence"),
    [
        (
            "os._exit(7)",
            7,
            f"rank 1 ended with exit code 7{REMEDY}see what it wrote, above; if that is nothing, look for",
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL, f"rank 1 was ended by SIGKILL{REMEDY}"),
    ],
)
def test_a_rank_that_says_nothing_ends_all_and_its_exit_code_is_the_launchers(machine, run, end, code, sentence):
    os.mkfifo(machine.folder / "pids")
    returned, said = run(
        "import os, signal, threading\n"
        "if os.environ['RANK'] == '0':\n"
        "    with open('pids', 'w') as pids: pids.write(str(os.getpid()))\n"
        "    threading.Event().wait()\n"
        "other = open('pids').read()\n"  # there once the other rank is
        f"open('found', 'w').write(f'{{other}} {{os.getpid()}}')\n{end}\n",
    )
    assert returned == code
    assert said.startswith(f"accelcore: the job ended because {sentence}"), said
    for pid in (machine.folder / "found").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_launcher_that_is_told_to_end_says_so(machine):
    machine.write("train.py", "import os, signal\nos.write(1, b'.\\n')\nsignal.pause()\n")
    launcher = machine.start("run", "--nproc", "2", "train.py", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert [launcher.stdout.readline(), launcher.stdout.readline()] == [".\n", ".\n"]
    launcher.terminate()
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert said.splitlines()[-1] == "accelcore: the job was ended by SIGTERM"
    assert "Traceback" not in said


# Which rank it was.


def reported(message, at, *, traceback="", because=(), shown=True, code=1):
    return Failure(code, noticed=100, report=FailureReport(message, at, traceback or message, because, shown))


@pytest.mark.parametrize(
    ("failures", "why", "code"),
    [
        ({0: reported("KeyError: 'a'", 99.2), 1: reported("ValueError: b", 99.1)}, "rank 1 failed with", 1),
        ({0: reported("DistributedError: 1", 99.1, because=(1,)), 1: reported("E: b", 99.2)}, "rank 1 failed with", 1),
        ({0: reported("DistributedError: 1", 99.1, because=(1,)), 1: Failure(3, 100)}, "rank 1 ended with", 3),
        # The launcher ended rank 0, which was slow to leave.
        ({1: reported("E: b", 99.2), 0: reported("E: a", 99.1, code=-15)}, "rank 0 failed with exit code 1: E: a", 1),
        ({0: reported("E: a", 99, code=5)}, "rank 0 failed with exit code 5: E: a", 5),
        ({2: Failure(-15, 100), 0: Failure(3, 101)}, "rank 0 ended with exit code 3", 3),
        ({1: Failure(3, 100), 0: Failure(4, 100)}, "rank 1 ended with exit code 3", 3),
        ({0: Failure(-15, 100), 1: Failure(-15, 100)}, "rank 0 was ended by SIGTERM", 143),
        ({0: Failure(-11, 100)}, f"rank 0 was ended by SIGSEGV{REMEDY}set PYTHONFAULTHANDLER=1", 139),
        ({0: Failure(-63, 100)}, "rank 0 was ended by signal 63", 191),
        (
            {rank: reported("E: a", 99, traceback="same" if rank != 1 else "", shown=rank == 2) for rank in range(4)},
            "ranks 0, 2 and 3 failed alike with exit code 1: E: a",
            1,
        ),
        # On another machine than the rank that failed.
        ({0: reported("DistributedError: rank 5 failed", 99, because=(5,))}, "rank 0 failed with exit code 1: Dist", 1),
    ],
)
def test_the_rank_that_failed_first_by_itself_is_named(failures, why, code):
    said, returned = said_of(failures)
    assert said.startswith(f"accelcore: the job ended because {why}"), said
    assert returned == code


def test_a_traceback_that_no_rank_has_shown_is_shown_by_the_launcher():
    """The one that would have is ended before it could; or the rank that all wait for has gone on."""
    failures = {0: Failure(-15, 100), 1: reported("E: a", 99, traceback="Traceback ...\nE: a\n", shown=False)}
    said, _ = said_of(failures)
    assert said.startswith(
        "Traceback ...\nE: a\naccelcore: the job ended because rank 1 failed with exit code 1: E: a\n"
    )

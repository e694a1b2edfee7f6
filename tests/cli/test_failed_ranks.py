"""What a user sees if ranks of `accelcore run` fail: their tracebacks, and a sentence on which was the first."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from accelcore.cli.launcher import first_failure


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    """What torch's launcher says where nobody has set it is among what must not be seen."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def run(machine, launch):
    """A script on two ranks: what the launcher returned, and what it and the ranks wrote."""

    def run(code, **environ):
        machine.write("train.py", code)
        done = launch("--device", "cpu", "--nproc", 2, "train.py", **environ)
        assert "ChildFailedError" not in done.stderr
        assert "torch/distributed/run.py" not in done.stderr
        assert "OMP_NUM_THREADS" not in done.stderr
        return done.returncode, done.stderr

    return run


def test_the_rank_that_raised_first_is_named_last(run):
    code, said = run(
        "import torch, accelcore\n"
        "with accelcore.select().distributed() as job:\n"
        "    if job.rank == 1: raise ValueError('rank 1 gives up')\n"
        "    job.all_reduce(torch.ones(1))\n",
    )
    assert code == 1
    assert said.splitlines()[-1] == "accelcore: rank 1 failed first, with exit code 1: ValueError: rank 1 gives up"
    raised = said.index("[rank1]: Traceback (most recent call last):\n[rank1]:   File ")
    assert said.index('train.py", line 3', raised) < said.index("[rank1]: ValueError: rank 1 gives up\n", raised)
    assert "runpy" not in said
    assert "rank.py" not in said


def test_a_rank_that_lost_another_writes_one_line_and_the_launcher_the_reason(run):
    code, said = run(
        "import torch, accelcore\n"
        "with accelcore.select().distributed() as job:\n"
        "    if job.rank == 1: exit()\n"
        "    job.all_reduce(torch.ones(1))\n"
    )
    survivor = "DistributedError: rank 1 of this job ended by sys.exit(), and the others cannot go on without it"
    assert code == 1
    assert [line for line in said.splitlines() if line.startswith("[rank0]")] == [f"[rank0]: {survivor}"]
    assert "monitoredBarrier" not in said, "a rank that failed left the job without waiting"
    ending = said[said.rindex("accelcore: ") :]
    assert "what to do: let all ranks end" in ending
    assert "why: rank 1 failed at " in ending
    assert "; it has begun no step" in ending


def test_a_rank_that_is_done_and_ends_before_the_one_that_failed_is_not_named_first(run):
    code, said = run(
        "import atexit, signal, accelcore\n"
        "job = accelcore.select().join()\n"
        "atexit.register(signal.pause if job.rank == 0 else str)\n"  # rank 0 ends when the launcher ends it
        "if job.rank == 0: raise ValueError('rank 0 gives up')\n"
    )
    assert "[rank1]: DistributedError: rank 0 of this job failed" in said
    says = {
        1: "accelcore: rank 0 failed first, with exit code 1: ValueError: rank 0 gives up",
        120: "accelcore: rank 0 of this job failed, and the others cannot go on without it",  # rank 1's, with torch 2.7
    }
    assert says[code] in said.splitlines()


def test_a_script_that_cannot_be_compiled_shows_its_line_and_no_frame_of_ours(machine, fork):
    done = fork("-m", "accelcore.cli.rank", 0, "", machine.write("train.py", "if True print()")).finish()
    assert done.returncode == 1
    assert 'train.py", line 1' in done.stderr
    assert "runpy" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("SyntaxError: ")


def test_a_hook_of_the_scripts_own_is_called_and_a_rank_that_has_not_imported_torch_is_named(run):
    code, said = run(
        "import sys, os, signal\n"
        "if os.environ['RANK'] == '1': signal.pause()\n"
        "sys.excepthook = lambda kind, error, trace: print('own hook', file=sys.stderr)\n"
        "{}['a']\n",
        REAL_RANKS="1",
    )
    assert (code, said) == (1, "own hook\naccelcore: rank 0 failed first, with exit code 1: KeyError: 'a'\n")


@pytest.mark.parametrize(
    ("end", "code", "sentence"),
    [
        ("import sys; sys.exit(7)", 7, "rank 1 failed first, with exit code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL, "rank 1 failed first, by SIGKILL\n"),
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
    assert said.startswith(f"accelcore: {sentence}"), said
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


def test_ctrl_c_ends_a_job_with_one_line(machine, run):
    os.mkfifo(machine.folder / "ready")
    code, said = run(
        "import os, signal, threading, accelcore\n"
        "job = accelcore.select().distributed().__enter__()\n"  # torch's process group replaces the hook of exceptions
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background ignores it
        "if os.environ['RANK'] == '1': open('ready', 'w').close()\n"
        "else:\n"
        "    open('ready').close()\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n"
        "while True: threading.Event().wait(0.1)\n"
    )
    assert (code, said) == (130, "accelcore: interrupted\n")


def test_ctrl_c_ends_one_process_with_one_line_and_its_signal(machine):
    machine.write("train.py", "raise KeyboardInterrupt\n")
    done = machine.run("run", "train.py")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "accelcore: interrupted\n")


def test_a_script_that_handles_ctrl_c_itself_is_not_disturbed(machine):
    machine.write("handles.py", "try: raise KeyboardInterrupt\nexcept KeyboardInterrupt: raise SystemExit('saved')\n")
    done = machine.run("run", "handles.py")
    assert (done.returncode, done.stderr) == (1, "saved\n")
    machine.write("hook.py", "import sys\nsys.excepthook = lambda *_: print('mine')\nraise KeyboardInterrupt\n")
    done = machine.run("run", "hook.py")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "mine\n", "")


# Which rank it was.


@pytest.fixture
def failed(tmp_path):
    """A rank's failure as torch's launcher reports it; `message` and `at` are those of its error file."""

    def failed(code, message=None, at=0.0):
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        if message is not None:
            told = {"message": message, "extraInfo": {"py_callstack": "", "timestamp": str(int(at))}}
            file.write_text(json.dumps({"message": told}))
            os.utime(file, (at, at))
        return ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file=str(file))

    return failed


def test_the_rank_that_failed_first_by_itself_is_named(failed):
    cases = [
        (
            {0: failed(1, "E: a", 9.2), 1: failed(1, "E: b\nmore", 9.1)},
            "rank 1 failed first, with exit code 1: E: b",
            1,
        ),
        (
            {0: failed(1, "DistributedError: 1", 9.1), 1: failed(1, "E: b\n  why: it\n  what to do: c", 9.2)},
            "rank 1 failed first, with exit code 1: E: b",
            1,
        ),
        ({0: failed(1, "DistributedError: 1", 9.1), 1: failed(3)}, "rank 1 failed first, with exit code 3", 3),
        ({1: failed(1, "E: b", 9.2), 0: failed(-15, "E: a", 9.1)}, "rank 0 failed first, with exit code 1: E: a", 1),
        ({0: failed(1, "DistributedError: rank 1 left\n  why: so", 9.1)}, "rank 1 left\n  why: so", 1),
        (
            {0: failed(1, "DistributedError: a\n  why: b", 9), 1: failed(3)},
            "rank 1 failed first, with exit code 3\n  why: b",
            3,
        ),
        (
            {
                1: failed(1, "DistributedError: rank 1 has ended its part of the job, and rank 0 did not", 9.1),
                0: failed(1, "DistributedError: not every rank of the job came to trainer.save()", 9.2),
            },
            "not every rank of the job came to trainer.save()",
            1,
        ),
        (
            {
                1: failed(1, "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1", 9.1),
                0: failed(1, "DistributedError: not every rank of the job came to job.mean()", 9.2),
            },
            "not every rank of the job came to job.mean()",
            1,
        ),
        ({2: failed(-15), 0: failed(3)}, "rank 0 failed first, with exit code 3", 3),
        ({0: failed(-15), 1: failed(-15)}, "rank 0 failed first, by SIGTERM", 143),
        ({0: failed(-9)}, "rank 0 failed first, by SIGKILL\n  what to do: check whether memory ran out", 137),
        (
            {0: failed(-6), 1: failed(-15)},
            "rank 0 failed first, by SIGABRT\n  what to do: read the last lines above. If they are of gloo",
            134,
        ),
        ({0: failed(-63)}, "rank 0 failed first, by signal 63", 191),
    ]
    for failures, sentence, code in cases:
        said, returned = first_failure(failures)
        assert said.startswith(sentence), said
        assert returned == code

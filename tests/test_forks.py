"""The forks that other tests run scripts in end as processes would."""

from __future__ import annotations

import signal
import subprocess

import pytest


@pytest.fixture
def run(fork, tmp_path):
    def run(code, *arguments, timeout=120, **environment):
        (tmp_path / "script.py").write_text(code)
        return fork(tmp_path / "script.py", *arguments, **environment).finish(timeout)

    return run


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("print('well')", 0, ""),
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('in words')", 1, "in words"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import warnings; warnings.warn('careful')", 1, "UserWarning: careful"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    ],
)
def test_the_end_of_a_script_is_told(run, code, status, said):
    ended = run(code)
    assert ended.returncode == status
    assert said in ended.stderr
    assert ended.stdout == ("well\n" if status == 0 else "")


def test_a_script_has_its_own_arguments_and_environment(run, monkeypatch):
    monkeypatch.setenv("INHERITED", "1")
    code = "import os, sys; print(__name__, sys.argv[1:], os.environ['INHERITED'], os.environ['GIVEN'])"
    assert run(code, "a", 2, GIVEN="b").stdout == "__main__ ['a', '2'] 1 b\n"


def test_threads_of_torch_work(run):
    """They would be waited for without end, had the server had some before the fork."""
    code = """
import torch
torch.set_num_threads(2)
weight = torch.randn(400, 400, requires_grad=True)
(weight @ weight).relu().sum().backward()
print(torch.get_num_threads(), weight.grad.isfinite().all().item())
"""
    assert run(code).stdout == "2 True\n"


def test_what_does_not_end_is_ended(run):
    with pytest.raises(subprocess.TimeoutExpired):
        run("import threading; threading.Event().wait()", timeout=0.2)

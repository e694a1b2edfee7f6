"""`accelcore replay`: exit codes, and what it refuses to replace."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from accelcore.cli import main
from accelcore.parity.recording import Reader


@pytest.fixture
def forked(fork, monkeypatch):
    """Scripts run in forks. In a process of its own, one runs in the test of a script that ends with the command."""

    def run(command, *, check):
        runner = next(number for number, word in enumerate(command) if word.endswith("script.py"))
        done = fork(*command[runner:]).finish()
        sys.stderr.write(done.stderr)
        return done

    monkeypatch.setattr("accelcore.cli.parity.subprocess", SimpleNamespace(run=run))


def test_itself_replaces_no_recording(tmp_path, capsys):
    reference = tmp_path / "ref"
    reference.mkdir()
    (reference / "mine").write_text("mine")
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)")
    assert main(["replay", "--self", str(reference), str(script)]) == 64
    assert "exists" in capsys.readouterr().err
    assert (reference / "mine").read_text() == "mine"


def test_a_recording_that_is_missing_starts_nothing(tmp_path, capsys):
    assert main(["replay", str(tmp_path / "ref"), __file__]) == 64
    said = capsys.readouterr().err
    assert "no recording in" in said
    assert "accelcore record --out" in said


@pytest.mark.usefixtures("forked")
def test_a_recording_is_found_in_the_home_folder(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ref" / "rank-00000").mkdir(parents=True)
    (tmp_path / "ref" / "rank-00000" / "recording.json").write_text("{")
    assert main(["replay", "~/ref", __file__]) == 64
    assert f"{tmp_path}/ref/rank-00000" in capfd.readouterr().err


def test_record_replaces_nothing(tmp_path, capsys):
    (tmp_path / "ref").mkdir()
    assert main(["record", "--out", str(tmp_path / "ref"), __file__]) == 64
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize("reference", ["../ref", "."])
@pytest.mark.usefixtures("forked")
def test_a_damaged_recording_is_an_invalid_request(tmp_path, capfd, monkeypatch, reference):
    rank = tmp_path / "ref" / "rank-00000"
    rank.mkdir(parents=True)
    (rank / "recording.json").write_text(json.dumps({"format": 1}))
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path / "ref")
    assert main(["replay", reference, str(script)]) == 64
    assert "damaged" in capfd.readouterr().err


@pytest.mark.usefixtures("forked")
def test_a_script_that_fails_is_named_with_its_exit_code(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)")
    assert main(["replay", "--self", str(tmp_path / "new"), str(script)]) == 2
    assert "exit code 3" in capfd.readouterr().err


@pytest.mark.full  # in every run: below, how a script ended is in the exit code
def test_the_script_ends_with_the_command(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import time; print('here', flush=True); time.sleep(100)")
    command = [sys.executable, "-m", "accelcore", "record", "--out", str(tmp_path / "ref"), str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "here\n"
        process.terminate()
        process.communicate(timeout=60)  # until the script has closed its stdout, too
    assert process.returncode == 128 + signal.SIGTERM


def test_a_signal_that_ends_the_script_is_in_the_exit_code(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.touch()
    killed = SimpleNamespace(returncode=-signal.SIGKILL)
    monkeypatch.setattr("accelcore.cli.parity.subprocess", SimpleNamespace(run=lambda *_, **__: killed))
    assert main(["record", "--out", str(tmp_path / "ref"), str(script)]) == 128 + signal.SIGKILL


_SCRIPT = """
import sys, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.tail = torch.nn.Linear(4, 4), torch.nn.Tanh()

    def forward(self, *, x):
        return self.tail(self.scale(x - float(sys.argv[1]) * x.mean(0)))

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(x=torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.usefixtures("forked")
def test_a_loop_of_its_own_that_calls_its_model_by_keyword_is_recorded(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    reference = tmp_path / "ref"
    assert main(["record", "--batches", "--out", str(reference), str(script), "0"]) == 0
    steps = [Reader(reference / "rank-00000").step(number) for number in (1, 2, 3)]
    for step in steps:
        assert [seen.shape for seen in step.seen if seen.event.kind == "batch"] == [(8, 4)]
    capfd.readouterr()
    assert main(["replay", "--json", "--batch", "1", "--take-batches", str(reference), str(script), "1"]) == 1
    found = json.loads(capfd.readouterr().out)
    assert (found["phase"], found["module"], found["item"]) == ("batch size", "", "input 0 of scale")


@pytest.mark.usefixtures("forked")
def test_a_module_is_recorded_and_replayed(tmp_path, capfd, monkeypatch):
    (tmp_path / "of_mine").mkdir()
    (tmp_path / "of_mine" / "train.py").write_text(_SCRIPT)
    monkeypatch.chdir(tmp_path)
    assert main(["record", "--out", "ref", "--steps", "1", "-m", "of_mine.train", "0"]) == 0
    assert capfd.readouterr().err.splitlines()[-1] == "accelcore: ref: 1 step recorded"
    assert main(["replay", "-m", "ref", "of_mine.train", "0"]) == 0
    assert "agree to the bit in 1 step\n" in capfd.readouterr().out


def test_a_script_that_is_missing_starts_nothing(tmp_path, capsys):
    missing = str(tmp_path / "train.py")
    for command in (["advise"], ["record", "--out", str(tmp_path / "ref")], ["replay", str(tmp_path)]):
        assert main([*command, missing]) == 64
        said = capsys.readouterr()
        assert "no script" in said.err
        assert "trial" not in said.err + said.out

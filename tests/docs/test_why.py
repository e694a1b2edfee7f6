"""docs/why.md says what happens to a training by torch and to one by accelcore: here it happens to both."""

from __future__ import annotations

import re
import shutil
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

PAGE = (Path(__file__).parents[2] / "docs" / "why.md").read_text(encoding="utf-8")
SCRIPTS = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", PAGE, re.M | re.S))
BOTH = ("by_torch", "by_accelcore")

ROW = 5  # of which the model is wrong by little, so that fp16 has room for a scale of 2**16


class Rows(torch.utils.data.Dataset):
    """As many rows of the page's data as wanted; of those that are read, some are bad.

    Args:
        rows: the page's data.
        only: the one row that all are; None: all, in turn.
        bad: which readings give numbers that fp16 does not hold.
    """

    def __init__(self, rows, size=336, only=None, bad=range(0)):
        self.rows, self.size, self.only, self.bad, self.read = rows, size, only, bad, -1

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read += 1
        row, target = self.rows[index % len(self.rows) if self.only is None else self.only]
        return row * (1e6 if self.read in self.bad else 1), target


def page_data():
    names = {}
    exec(SCRIPTS["data"], names)
    return names["data"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs one of the scripts, in a folder of its own, with a training of so many epochs."""
    monkeypatch.setenv("ACCEL_DEVICE", "cpu")

    def run(which, *, epochs=3, **rows):
        (tmp_path / which).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / which)
        module = ModuleType("data")
        module.data = Rows(page_data(), **rows)
        monkeypatch.setitem(sys.modules, "data", module)
        script = re.sub(r"(?<=start, |epochs\()3(?=\))", str(epochs), SCRIPTS[which])
        exec(compile(script, which, "exec"), {"__name__": "__main__"})

    run.folder = tmp_path
    return run


@pytest.fixture
def die(run, fork, monkeypatch):
    """Runs one of the scripts as `run` would, until it is killed: `first` is what is done first."""

    def die(which, first, by):
        folder = run.folder / which
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        (folder / "data.py").write_text(SCRIPTS["data"] + first)
        (folder / "script.py").write_text(SCRIPTS[which])
        done = fork(folder / "script.py", ACCEL_DEVICE="cpu").finish()
        assert done.returncode == -by, done.stderr

    return die


IN_THE_SECOND_EPOCH = """
import os, signal


class Rows(torch.utils.data.Dataset):
    read = 0

    def __len__(self):
        return len(rows)

    def __getitem__(self, index):
        self.read += 1
        if self.read == 400:
            os.kill(os.getpid(), signal.SIGKILL)
        return rows[index]


rows, data = data, Rows()
"""
WHILE_IT_SAVES = """
import resource, signal

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # to write more kills
"""


def weights(folder, which):
    """What the newest checkpoint has, in one row."""
    if which == "by_torch":
        state = torch.load(folder / which / "checkpoint.pt")["model"]
    else:
        state = load_file(max((folder / which / "checkpoints").glob("step-*")) / "model.safetensors")
    return torch.cat([state[name].flatten() for name in sorted(state)])


def steps(folder):
    return int(max((folder / "by_accelcore" / "checkpoints").glob("step-*")).name.removeprefix("step-"))


def test_both_train_alike_also_when_a_batch_overflows(run):
    """For one epoch of full windows; what else they do differs after it."""
    for which in BOTH:
        run(which, epochs=1, size=320, bad=range(40, 48))
    by_torch, by_accelcore = (weights(run.folder, which) for which in BOTH)
    torch.testing.assert_close(by_accelcore, by_torch, rtol=1e-3, atol=1e-3)
    scaler = torch.load(run.folder / "by_torch" / "checkpoint.pt")["scaler"]
    assert (scaler["scale"], steps(run.folder)) == (2.0**15, 10)


def test_a_stretch_of_bad_data_makes_the_one_nan_and_is_told_of_by_the_other(run, caplog):
    said = []
    for which in BOTH:
        run(which, epochs=1, size=180 * 32, bad=range(170 * 32))
        said.append(caplog.text)
    assert weights(run.folder, "by_torch").isnan().all()
    assert weights(run.folder, "by_accelcore").isfinite().all()
    assert said[0] == ""
    assert "updates in a row were skipped because gradients overflowed. The loss scale is 1." in said[1]
    assert "The first inf or NaN gradient is that of 0.weight" in said[1]


def by_hand(shares):
    """What updates with so many times the gradient make of the model, where all rows are alike; in fp32."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    x, y = page_data()[ROW : ROW + 1]
    for share in shares:
        gradients = torch.autograd.grad(torch.nn.functional.mse_loss(model(x), y), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.05 * share * gradient
    return torch.cat([value.flatten() for _, value in sorted(model.state_dict().items())])


def test_the_end_of_an_epoch_waits_for_the_next_one_or_is_a_window(run):
    """Of 6 batches that are all alike, two are left over in each of two epochs."""
    for which in BOTH:
        run(which, epochs=2, size=48, only=ROW)
    assert steps(run.folder) == 4
    close = {"rtol": 1e-3, "atol": 3e-4}
    torch.testing.assert_close(weights(run.folder, "by_torch"), by_hand([1, 1.5]), **close)
    torch.testing.assert_close(weights(run.folder, "by_accelcore"), by_hand([1, 1, 1, 1]), **close)
    assert (by_hand([1, 1.5]) - by_hand([1, 1])).abs().max() > 1e-3


@pytest.mark.parametrize("which", BOTH)
def test_a_run_that_is_killed_goes_on_otherwise_or_as_if_it_had_not_been(which, run, die):
    run(which)
    undisturbed = weights(run.folder, which)
    shutil.rmtree(run.folder / which)

    die(which, IN_THE_SECOND_EPOCH, signal.SIGKILL)
    if which == "by_accelcore":
        die(which, WHILE_IT_SAVES, signal.SIGXFSZ)
        run(which)
        assert torch.equal(weights(run.folder, which), undisturbed)
    else:
        before = shutil.copy("checkpoint.pt", "before.pt")
        run(which)
        assert not torch.allclose(weights(run.folder, which), undisturbed, rtol=1e-3, atol=1e-4)
        shutil.copy(before, "checkpoint.pt")
        die(which, WHILE_IT_SAVES, signal.SIGXFSZ)
        with pytest.raises((RuntimeError, EOFError)):
            run(which)

"""docs/why.md says what happens to a training by torch and to one by accelcore: here it happens to both."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

PAGE = (Path(__file__).parent.parent / "docs" / "why.md").read_text(encoding="utf-8")
SCRIPTS = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", PAGE, re.M | re.S))
BOTH = ("by_torch", "by_accelcore")

# The data of the page, of which each row is an event: rows that are bad, or the last that this process reads.
EVENTS = """
import os, resource, signal

resource.setrlimit(resource.RLIMIT_FSIZE, ({largest}, {largest}))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # to write more kills


class Rows(torch.utils.data.Dataset):
    read = 0

    def __len__(self):
        return {size}

    def __getitem__(self, index):
        self.read += 1
        if self.read == {dies}:
            os.kill(os.getpid(), signal.SIGKILL)
        row, target = rows[{row}]
        return row * (1e6 if self.read in {bad} else 1), target


rows, data = data, Rows()
"""
UNLIMITED = -1
ROW = 5  # of which the model is wrong by little, so that fp16 has room for a scale of 2**16


@pytest.fixture
def run(fork, tmp_path, monkeypatch):
    """Runs one of the scripts, in a folder of its own, with a training of so many epochs."""

    def run(which, *, code=0, epochs=3, size=336, dies=None, bad=range(0), row="index % 336", largest=UNLIMITED):
        folder = tmp_path / which
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        events = EVENTS.format(size=size, row=row, dies=dies, bad=bad, largest=largest)
        (folder / "data.py").write_text(SCRIPTS["data"] + events)
        (folder / "script.py").write_text(re.sub(r"(?<=start, |epochs\()3(?=\))", str(epochs), SCRIPTS[which]))
        done = fork(folder / "script.py", ACCEL_DEVICE="cpu").finish()
        assert done.returncode == code, done.stderr
        return done

    run.folder = tmp_path
    return run


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


def test_a_stretch_of_bad_data_makes_the_one_nan_and_is_told_of_by_the_other(run):
    said = [run(which, epochs=1, size=180 * 32, bad=range(170 * 32)).stderr for which in BOTH]
    assert weights(run.folder, "by_torch").isnan().all()
    assert weights(run.folder, "by_accelcore").isfinite().all()
    assert said[0] == ""
    assert "updates in a row were skipped, because gradients overflowed; the loss scale is 1." in said[1]
    assert "The first that is inf or NaN is that of 0.weight" in said[1]


def by_hand(shares):
    """What updates with so many times the gradient make of the model, where all rows are alike; in fp32."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    names: dict = {}
    exec(SCRIPTS["data"], names)
    x, y = names["data"][ROW : ROW + 1]
    for share in shares:
        gradients = torch.autograd.grad(torch.nn.functional.mse_loss(model(x), y), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.05 * share * gradient
    return torch.cat([value.flatten() for _, value in sorted(model.state_dict().items())])


def test_the_end_of_an_epoch_waits_for_the_next_one_or_is_a_window(run):
    """Of 6 batches that are all alike, two are left over in each of two epochs."""
    for which in BOTH:
        run(which, epochs=2, size=48, row=ROW)
    assert steps(run.folder) == 4
    close = {"rtol": 1e-3, "atol": 3e-4}
    torch.testing.assert_close(weights(run.folder, "by_torch"), by_hand([1, 1.5]), **close)
    torch.testing.assert_close(weights(run.folder, "by_accelcore"), by_hand([1, 1, 1, 1]), **close)
    assert (by_hand([1, 1.5]) - by_hand([1, 1])).abs().max() > 1e-3


@pytest.mark.parametrize("which", BOTH)
def test_a_run_that_is_killed_goes_on_otherwise_or_as_if_it_had_not_been(which, run):
    killed, halved = -signal.SIGKILL, -signal.SIGXFSZ
    run(which)
    undisturbed = weights(run.folder, which)
    shutil.rmtree(run.folder / which)

    run(which, dies=400, code=killed)  # in the second epoch
    if which == "by_torch":
        run(which)
        assert not torch.allclose(weights(run.folder, which), undisturbed, rtol=1e-3, atol=1e-4)
        run(which, epochs=4, largest=1000, code=halved)
        assert "checkpoint.pt" in run(which, epochs=4, code=1).stderr
    else:
        run(which, largest=1000, code=halved)
        run(which)
        assert torch.equal(weights(run.folder, which), undisturbed)

"""A process with ACCEL_TRIAL: what its trainers do otherwise, what they record, and where the script ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import accelcore
from accelcore.devices.request import TRIAL, requested_trial


@pytest.fixture
def on_trial(tmp_path, monkeypatch):
    """Puts this process on trial; returns what was recorded so far."""
    report = tmp_path / "trial.jsonl"

    def begin(**request):
        monkeypatch.setenv(TRIAL, json.dumps({"report": str(report), "steps": 4, **request}))

    begin.lines = lambda: [json.loads(line) for line in report.read_text().splitlines()]
    return begin


def data():
    rows = torch.linspace(-1, 1, 64).reshape(16, 4)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True)), 4, shuffle=True)


def train(accel, folder=None, *, epochs=3, **options):
    """The script: train for at most 12 windows, and save after each epoch."""
    accel.runtime.seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    options.setdefault("loss", lambda model, batch: (model(batch[0]) - batch[1]).square().mean())
    trainer = accel.trainer(model, accel.optimizers.create("adamw", model.parameters(), lr=0.01), **options)
    loader = data()
    if folder is not None:
        trainer.resume(folder)
    losses = []
    for _ in trainer.epochs(epochs):
        for batch in trainer.batches(loader):
            losses.append(trainer(batch).item())
        if folder is not None:
            trainer.save(folder)
    return trainer, losses


def recorded(accel, on_trial, **request):
    on_trial(**request)
    before = len(on_trial.lines()) if Path(requested_trial().report).exists() else 0
    with pytest.raises(SystemExit) as end:
        train(accel)
    assert end.value.code == 0
    return [line["loss"] for line in on_trial.lines()[before:] if "step" in line]


def test_a_trial_records_each_step_and_ends_the_script(accel, on_trial):
    _, losses = train(accel)
    found = recorded(accel, on_trial)
    assert found == losses[:4]  # the observer changes no bit
    about, *rest = on_trial.lines()
    assert (about["name"], about["device"], about["emulated"]) == ("Sequential", "cpu", False)
    assert "bfloat16" in about["autocast"]
    assert [line["step"] for line in rest if "step" in line] == [1, 2, 3, 4]
    assert all(line["seconds"] > 0 for line in rest if line.get("step", 1) > 1 and "step" in line)
    assert len([line for line in rest if "checksums" in line]) == 4
    assert (rest[-1]["done"], rest[-1]["memory"] > 0) == (4, True)


def test_a_batch_may_have_scalars(accel, on_trial):
    on_trial(steps=1)
    model = nn.Linear(1, 1)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    trainer = accel.trainer(model, optimizer, loss=lambda model, batch: model(batch["rows"]).sum() * batch["weight"])
    batches = trainer.batches([{"rows": torch.ones(2, 1), "weight": torch.tensor(2.0)}])
    with pytest.raises(SystemExit):
        list(map(trainer, batches))
    assert [len(line["checksums"]) for line in on_trial.lines() if "checksums" in line] == [2]


def test_a_window_counts_as_one_step_with_the_mean_loss(accel, on_trial):
    _, losses = train(accel, accumulate=2)
    on_trial(steps=2)
    with pytest.raises(SystemExit):
        train(accel, accumulate=2)
    found = [line["loss"] for line in on_trial.lines() if "step" in line]
    assert found == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:4]) / 2])


@pytest.mark.parametrize(
    ("options", "model_dtype"),
    [({"precision": "fp32"}, torch.float32), ({"precision": "O2 bfloat16"}, torch.bfloat16)],
)
def test_the_options_of_a_trial_replace_the_scripts(accel, on_trial, caplog, options, model_dtype):
    on_trial(options=options, steps=100)
    trainer, _ = train(accel, precision="fp16", loss_scale=128.0)
    assert trainer.model[0].weight.dtype == model_dtype
    assert trainer.scaler.scale(torch.ones(())) == 1
    assert on_trial.lines()[0]["overridden"] == ["precision='fp16'", "loss_scale=128.0"]
    assert "precision='fp16'" in caplog.text


def test_another_seed_changes_weights_and_order_and_the_same_one_changes_nothing(accel, on_trial):
    first, again, other = (recorded(accel, on_trial, seed=seed) for seed in (0, 0, 7))
    assert first == again
    assert first[0] != other[0]


def test_seeds_reach_a_script_that_seeds_torch_itself(accel, on_trial, monkeypatch):
    monkeypatch.setattr(accel.runtime, "seed", torch.manual_seed)
    first, other = (recorded(accel, on_trial, seed=seed) for seed in (0, 7))
    assert first[1:] != other[1:]


def test_a_trial_touches_neither_checkpoints_nor_logs(accel, on_trial, tmp_path):
    _, losses = train(accel)
    folder = tmp_path / "outputs"
    train(accel, folder, observers=[accelcore.Log(folder, plot=False)], epochs=1)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert before
    on_trial(steps=6)  # the script saves after the fourth
    with pytest.raises(SystemExit):
        train(accel, folder, observers=[accelcore.Log(folder, plot=False)])
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert [line["loss"] for line in on_trial.lines() if "step" in line] == losses[:6]  # it did not resume


def test_overflows_are_recorded(accel, on_trial):
    on_trial(options={"precision": "fp16"}, steps=3)
    with pytest.raises(SystemExit):
        train(accel, loss=lambda model, batch: model(batch[0]).square().mean() * 1e3)
    assert next(line["overflow"] for line in on_trial.lines() if "step" in line)


def test_without_a_request_there_is_no_trial(monkeypatch):
    for text in ("", None):
        monkeypatch.setenv(TRIAL, text) if text is not None else monkeypatch.delenv(TRIAL)
        assert requested_trial() is None

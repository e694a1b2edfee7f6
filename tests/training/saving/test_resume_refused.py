"""Checkpoints that are damaged, or of another training, are refused."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import accelcore


def damage_truncate(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def damage_flip(path):
    file = path / "shared.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def damage_empty(path):
    (path / "model.safetensors").write_bytes(b"")


def damage_remove(path):
    (path / "rank-00000.safetensors").unlink()


def damage_manifest(path):
    file = path / "manifest.json"
    file.write_text(file.read_text()[:40])


def damage_manifest_value(path):
    file = path / "manifest.json"
    file.write_text(file.read_text().replace('"steps": 2', '"steps": 3'))


def damage_all(path):
    for file in path.iterdir():
        file.unlink()


@pytest.mark.parametrize(
    "damage",
    [damage_truncate, damage_flip, damage_empty, damage_remove, damage_manifest, damage_manifest_value, damage_all],
)
def test_a_damaged_checkpoint_is_refused_and_the_older_one_named(accel, tmp_path, damage, build, final):
    trainer, loader = build(accel)
    older = None
    for number, batch in enumerate(trainer.batches(loader), start=1):
        trainer(batch)
        if number == 1:
            older = trainer.save(tmp_path)
        if number == 2:
            newest = trainer.save(tmp_path)
            break
    damage(newest)

    fresh, loader = build(accel)
    before = final(fresh)
    with pytest.raises(accelcore.CheckpointError, match="damaged") as raised:
        fresh.resume(tmp_path)
    assert f'trainer.resume("{older}"), or accelcore export {older} ' in str(raised.value)
    assert all(torch.equal(value, final(fresh)[name]) for name, value in before.items())
    assert fresh.steps == 0
    assert fresh.resume(older) == older
    assert fresh.steps == 1


def test_a_missing_checkpoint_asked_for_by_name_is_an_error(accel, tmp_path, build):
    trainer, _ = build(accel)
    with pytest.raises(accelcore.CheckpointError, match="step-00000005"):
        trainer.resume(tmp_path / "step-00000005")
    (tmp_path / "file").write_text("x")
    with pytest.raises(accelcore.CheckpointError, match="is a file"):
        trainer.resume(tmp_path / "file")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda: nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Linear(9, 1)),
            r"step-\d+ belongs to another model",
        ),
        (lambda: nn.Sequential(nn.Linear(5, 9)), r"2 of another shape or dtype: 0.weight \(\(9, 5\) .* in the model, "),
    ],
)
def test_a_checkpoint_of_another_model_changes_nothing(accel, tmp_path, change, says, build):
    trainer, _ = build(accel)
    trainer.save(tmp_path)
    other = change()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    stranger = accel.trainer(other, accel.optimizers.create("adamw", other.parameters()))
    with pytest.raises(accelcore.CheckpointError, match=says):
        stranger.resume(tmp_path)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in before.items())


def test_another_optimizer_scheduler_scaler_or_window_is_refused(accel, tmp_path, build, final):
    trainer, loader = build(accel, accumulate=2)
    for batch in trainer.batches(loader):
        trainer(batch)
        break
    trainer.save(tmp_path)  # within a window

    def refused(says, **options):
        other, _ = build(accel, **options)
        before = final(other)
        with pytest.raises(accelcore.CheckpointError, match=says):
            other.resume(tmp_path)
        assert all(torch.equal(value, final(other)[name]) for name, value in before.items())

    (newest,) = tmp_path.iterdir()
    refused(
        rf"{re.escape(str(newest))} belongs to another optimizer(.|\n)*trainer\.load\(\"{re.escape(str(newest))}",
        optimizer="sgd",
        accumulate=2,
    )
    other, _ = build(accel, optimizer="sgd")
    other.load(newest / "model.safetensors")
    assert all(torch.equal(value, final(other)[name]) for name, value in final(trainer).items())
    refused("window", accumulate=3)
    refused("another loss scale", precision="fp16", accumulate=2)
    model = trainer.model
    bare = accel.trainer(model, accel.optimizers.create("adamw", model.parameters(), lr=1e-2), accumulate=2)
    with pytest.raises(accelcore.CheckpointError, match="scheduler"):
        bare.resume(tmp_path)


def test_adam_and_adamw_are_not_one_and_another_static_scale_is_gone_on_with(accel, tmp_path, caplog):
    model = nn.Linear(2, 1)

    def trainer(name, loss_scale):
        return accel.trainer(model, accel.optimizers.create(name, model.parameters()), loss_scale=loss_scale)

    trainer("adamw", 128.0).save(tmp_path)
    with pytest.raises(accelcore.CheckpointError, match="another optimizer"):
        trainer("adam", 128.0).resume(tmp_path)
    other = trainer("adamw", 1024.0)
    other.resume(tmp_path)
    assert other.scaler.state_dict()["scale"] == 1024.0
    (line,) = (record.message for record in caplog.records)
    assert "a static loss scale of 128.0, and this training a static loss scale of 1024.0" in line


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
    ],
    ids=["LambdaLR", "CosineAnnealingLR"],
)
def test_another_schedule_changes_nothing(accel, tmp_path, schedule, build, run):
    trainer, loader = build(accel)
    run(trainer, loader, save_after=4, folder=tmp_path)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=0.5)
    other = accel.trainer(model, optimizer, scheduler=schedule(optimizer))
    state = {key: str(value) for key, value in other.scheduler.state_dict().items()}
    with pytest.raises(accelcore.CheckpointError, match="OneCycleLR"):
        other.resume(tmp_path)
    assert not optimizer.state
    assert {key: str(value) for key, value in other.scheduler.state_dict().items()} == state
    assert optimizer.param_groups[0]["lr"] > 0.4


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.update(steps="x"),
        lambda manifest: manifest.pop("world_size"),
        lambda manifest: manifest["files"].update({"../secret": {"bytes": 1, "sha256": ""}}),
        lambda manifest: manifest.update(files=[]),
        lambda manifest: manifest["files"].pop("shared"),
        lambda manifest: manifest.update(run=5),
        lambda manifest: manifest.update(trainers={"": -1}),
        lambda manifest: manifest.pop("trainers"),
        lambda manifest: manifest.update(pieces={"model": {"0.weight": [["nowhere", 0, 8]]}}),
        lambda manifest: manifest.update(pieces={"model": {"0.weight": [["model", -1, 8]]}}),
        lambda manifest: manifest.update(pieces={"model": {"0.weight": [["model", 2, 8]]}}),
        lambda manifest: manifest.update(pieces=[]),
        lambda manifest: manifest.pop("pieces"),
    ],
)
def test_a_forged_manifest_is_refused(accel, tmp_path, change, build, final):
    trainer, _ = build(accel)
    forge_manifest(trainer.save(tmp_path), change)
    before = final(trainer)
    with pytest.raises(accelcore.CheckpointError):
        trainer.resume(tmp_path)
    assert all(torch.equal(value, final(trainer)[name]) for name, value in before.items())


@pytest.mark.parametrize("number", [0, 2, 1.0, "1", True])
def test_a_checkpoint_of_another_format_is_refused_by_its_number(accel, tmp_path, number, build):
    trainer, _ = build(accel)
    forge_manifest(trainer.save(tmp_path), lambda manifest: manifest.update(format=number))
    with pytest.raises(accelcore.CheckpointError, match=f"has format {number!r}.*reads format 1"):
        trainer.resume(tmp_path)


def forge_manifest(path, change):
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("sha256")
    change(manifest)
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": digest}))


def test_reading_a_planted_pickle_runs_nothing(accel, tmp_path, build):
    import pickle

    class Planted:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    trainer, _ = build(accel)
    path = trainer.save(tmp_path)
    (path / "model.safetensors").write_bytes(pickle.dumps(Planted()))
    with pytest.raises(accelcore.CheckpointError):
        trainer.resume(tmp_path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda noisy: DataLoader(noisy(22), 8, shuffle=True), "number of batches was 6, and the loader's is 3"),
        (lambda noisy: DataLoader(noisy(20), 4, shuffle=True), "number of batches"),
        (lambda noisy: DataLoader(noisy(21), 4, shuffle=True), "number of rows was 22, and the loader's is 21"),
        (
            lambda noisy: DataLoader(noisy(22), 4),
            "sampler was RandomSampler, and the loader's is SequentialSampler",
        ),
        (lambda noisy: (batch for batch in DataLoader(noisy(8), 4)), "has only 2"),
    ],
    ids=["batch size", "batches", "rows", "order", "iterator"],
)
def test_an_epoch_goes_on_with_the_same_batches_only(accel, tmp_path, build, run, noisy, make, says):
    trainer, loader = build(accel)
    run(trainer, loader, save_after=5, folder=tmp_path)
    other, _ = build(accel)
    other.resume(tmp_path)
    with pytest.raises(accelcore.CheckpointError, match=says):
        next(iter(other.batches(make(noisy))))


@pytest.mark.parametrize("is_empty", [False, True])
def test_groups_of_other_parameters_name_the_first_that_differs(accel, tmp_path, is_empty):
    model = nn.Linear(2, 1)
    weight, bias = model.parameters()

    def trainer(*groups):
        optimizer = accel.optimizers.create("sgd", [{"params": group} for group in groups], lr=0.1)
        return accel.trainer(model, optimizer, loss=lambda model, batch: model(batch).sum())

    trainer([bias], [weight]).save(tmp_path)
    groups = [[], [weight, bias]] if is_empty else [[weight], [bias]]
    with pytest.raises(
        accelcore.CheckpointError, match="parameter group 0 here lacks 'bias', and that of the checkpoint"
    ):
        trainer(*groups).resume(tmp_path)

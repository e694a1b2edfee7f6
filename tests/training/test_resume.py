"""Saving and going on: bit-same results, whatever happens in between."""

from __future__ import annotations

import hashlib
import json
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

import accelcore
from accelcore.checkpoint import store

KILLED = Path(__file__).with_name("killed_run.py")


class Noisy(Dataset):
    """Random augmentation from every generator a data set might use."""

    def __init__(self, size: int = 22) -> None:
        self.inputs = torch.randn(size, 5, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index):
        noise = torch.randn(5) * 0.1 + random.random() * 0.1 + np.random.random() * 0.1
        return self.inputs[index] + noise, self.inputs[index].sum(0, keepdim=True)


def build(accel, *, precision="fp32", accumulate=1, optimizer="adamw", workers=0, generator=None, **options):
    accel.runtime.seed(5)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
    optimizer = accel.optimizers.create(optimizer, model.parameters(), lr=1e-2, **options)
    trainer = accel.trainer(
        model,
        optimizer,
        loss=lambda m, batch: mse_loss(m(batch[0]), batch[1]),
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=100, cycle_momentum=False),
        precision=precision,
        accumulate=accumulate,
        clip_norm=1.0,
    )
    loader = DataLoader(Noisy(), 4, shuffle=True, num_workers=workers, generator=generator)
    return trainer, loader


def run(trainer, loader, epochs=3, save_after=None, folder=None):
    """Train; the loss of each micro-batch. Stops once it has saved after `save_after` of them."""
    losses = []
    for _ in range(trainer.epoch, epochs):
        for batch in trainer.batches(loader):
            losses.append(trainer(batch).item())
            if len(losses) == save_after:
                trainer.save(folder)
                return losses
    return losses


def final(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize(
    ("save_after", "options"),
    [
        (1, {}),
        (6, {}),  # the last batch of the first epoch, still inside the loop
        (8, {"precision": "fp16"}),
        (9, {"accumulate": 4}),  # in the middle of a window
        (11, {"accumulate": 4, "precision": "fp16"}),
        (8, {"workers": 2}),
        (8, {"generator": 11}),
        (8, {"optimizer": "sgd", "momentum": 0.9}),
        (8, {"optimizer": "rmsprop", "centered": True}),
        (8, {"route": "loop"}),
    ],
    ids=str,
)
def test_a_resumed_run_is_bit_same(accel, tmp_path, save_after, options):
    def start():
        seed = options.get("generator")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return build(accel, **{**options, "generator": generator})

    undisturbed, loader = start()
    expected = run(undisturbed, loader)

    first, loader = start()
    losses = run(first, loader, save_after=save_after, folder=tmp_path)
    second, loader = start()
    assert second.resume(tmp_path) is not None
    assert second.steps == first.steps
    losses += run(second, loader)

    assert losses == expected
    assert second.skipped == undisturbed.skipped
    for name, value in final(undisturbed).items():
        assert torch.equal(value, final(second)[name]), name


def test_saved_between_two_epochs(accel, tmp_path):
    undisturbed, loader = build(accel)
    expected = run(undisturbed, loader)
    first, loader = build(accel)
    losses = run(first, loader, epochs=2)
    first.save(tmp_path)
    second, loader = build(accel)
    second.resume(tmp_path)
    assert second.epoch == 2
    assert losses + run(second, loader) == expected


@pytest.mark.parametrize("route", ["fused", "loop"])
def test_a_channels_last_run_resumes_bit_same(accel, tmp_path, route):
    def start():
        accel.runtime.seed(2)
        model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        optimizer = accel.optimizers.create("adamw", model.parameters(), lr=1e-2, route=route)
        return accel.trainer(model, optimizer, loss=lambda m, b: m(b).square().mean())

    batches = [torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last) for _ in range(6)]
    undisturbed, first, second = start(), start(), start()
    expected = [undisturbed(batch).item() for batch in batches]
    losses = [first(batch).item() for batch in batches[:3]]
    first.save(tmp_path)
    second.resume(tmp_path)
    assert losses + [second(batch).item() for batch in batches[3:]] == expected
    assert torch.equal(undisturbed.model.weight, second.model.weight)


def test_the_generator_of_a_sampler_is_part_of_the_position(accel, tmp_path):
    def start():
        trainer, _ = build(accel)
        sampler = torch.utils.data.RandomSampler(range(22), generator=torch.Generator().manual_seed(8))
        return trainer, DataLoader(Noisy(), 4, sampler=sampler)

    expected = run(*start())
    trainer, loader = start()
    losses = run(trainer, loader, save_after=9, folder=tmp_path)
    trainer, loader = start()
    trainer.resume(tmp_path)
    assert losses + run(trainer, loader) == expected


def test_persistent_workers_keep_the_order_after_a_resume(accel, tmp_path, caplog):
    class Rows(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.tensor([float(index)])

    def start():
        accel.runtime.seed(4)
        model = nn.Linear(1, 1)
        trainer = accel.trainer(
            model, accel.optimizers.create("sgd", model.parameters(), lr=0.01), loss=lambda m, b: m(b).square().mean()
        )
        return trainer, DataLoader(Rows(), 2, shuffle=True, num_workers=1, persistent_workers=True)

    def rows(trainer, loader, save_after=None):
        seen = []
        for _ in range(trainer.epoch, 3):
            for batch in trainer.batches(loader):
                trainer(batch)
                seen += batch.flatten().tolist()
                if len(seen) == save_after:
                    trainer.save(tmp_path)
                    return seen
        return seen

    expected = rows(*start())
    seen = rows(*start(), save_after=12)
    trainer, loader = start()
    trainer.resume(tmp_path)
    assert seen + rows(trainer, loader) == expected
    assert "persistent" in caplog.text


def test_killed_in_mid_epoch_and_resumed_with_workers_and_shuffling(fork, tmp_path):
    """SIGKILL, twice, at moments of its own choosing, two loader workers; the losses are those of a quiet run."""

    def train(folder, *arguments):
        ended = fork(KILLED, folder, *arguments).finish()
        assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
        return ended.returncode

    assert train(tmp_path / "quiet") == 0
    for batch in ("7", "17"):
        assert train(tmp_path / "killed", "--kill-at", batch) == -signal.SIGKILL
    assert train(tmp_path / "killed") == 0

    def losses(name):
        lines = (tmp_path / name / "losses.jsonl").read_text().splitlines()
        return {entry["batch"]: entry["loss"] for entry in map(json.loads, lines)}

    quiet = losses("quiet")
    assert len(quiet) == 24
    assert losses("killed") == quiet  # what was done twice after a kill overwrites, and so must agree too


def test_nothing_to_resume_is_none(accel, tmp_path):
    trainer, _ = build(accel)
    assert trainer.resume(tmp_path / "nowhere") is None
    assert trainer.resume(tmp_path) is None
    (tmp_path / ".incomplete").mkdir()
    assert trainer.resume(tmp_path) is None


def damage_truncate(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def damage_flip(path):
    file = path / "training.safetensors"
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
def test_a_damaged_checkpoint_is_refused_and_the_older_one_named(accel, tmp_path, damage):
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
    assert str(older) in str(raised.value)
    assert all(torch.equal(value, final(fresh)[name]) for name, value in before.items())
    assert fresh.steps == 0
    assert fresh.resume(older) == older
    assert fresh.steps == 1


def test_a_missing_checkpoint_asked_for_by_name_is_an_error(accel, tmp_path):
    trainer, _ = build(accel)
    with pytest.raises(accelcore.CheckpointError, match="step-00000005"):
        trainer.resume(tmp_path / "step-00000005")
    (tmp_path / "file").write_text("x")
    with pytest.raises(accelcore.CheckpointError, match="is a file"):
        trainer.resume(tmp_path / "file")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda: nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Linear(9, 1)), "another model"),
        (lambda: nn.Sequential(nn.Linear(5, 8)), "another model"),
    ],
)
def test_a_checkpoint_of_another_model_changes_nothing(accel, tmp_path, change, says):
    trainer, _ = build(accel)
    trainer.save(tmp_path)
    other = change()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    stranger = accel.trainer(other, accel.optimizers.create("adamw", other.parameters()))
    with pytest.raises(accelcore.CheckpointError, match=says):
        stranger.resume(tmp_path)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in before.items())


def test_another_optimizer_scheduler_scaler_or_window_is_refused(accel, tmp_path):
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

    refused("another optimizer", optimizer="sgd", accumulate=2)
    refused("window", accumulate=3)
    refused("loss scaler", precision="fp16", accumulate=2)
    model = trainer.model
    bare = accel.trainer(model, accel.optimizers.create("adamw", model.parameters(), lr=1e-2), accumulate=2)
    with pytest.raises(accelcore.CheckpointError, match="scheduler"):
        bare.resume(tmp_path)


def test_adam_and_adamw_are_not_one_and_a_static_scale_is_no_other(accel, tmp_path):
    model = nn.Linear(2, 1)

    def trainer(name, loss_scale):
        return accel.trainer(model, accel.optimizers.create(name, model.parameters()), loss_scale=loss_scale)

    trainer("adamw", 128.0).save(tmp_path)
    with pytest.raises(accelcore.CheckpointError, match="another optimizer"):
        trainer("adam", 128.0).resume(tmp_path)
    with pytest.raises(accelcore.CheckpointError, match=r"loss_scale=128\.0"):
        trainer("adamw", 1024.0).resume(tmp_path)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
    ],
    ids=["LambdaLR", "CosineAnnealingLR"],
)
def test_another_schedule_changes_nothing(accel, tmp_path, schedule):
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


def test_two_savers_in_one_folder_do_not_mix(accel, tmp_path):
    trainer, _ = build(accel)
    with store.alone(tmp_path), pytest.raises(accelcore.CheckpointError, match="another process is saving"):
        trainer.save(tmp_path)
    assert trainer.save(tmp_path).is_dir()


def test_a_sparse_gradient_of_an_open_window_is_named(accel, tmp_path):
    model = nn.Embedding(4, 2, sparse=True)
    trainer = accel.trainer(
        model,
        accel.optimizers.create("sgd", model.parameters(), route="loop"),
        loss=lambda m, b: m(b).sum(),
        accumulate=2,
    )
    trainer(torch.tensor([1]))
    with pytest.raises(accelcore.CheckpointError, match=r"gradients\.weight"):
        trainer.save(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.update(steps="x"),
        lambda manifest: manifest.pop("world_size"),
        lambda manifest: manifest["files"].update({"../secret": {"bytes": 1, "sha256": ""}}),
        lambda manifest: manifest.update(files=[]),
        lambda manifest: manifest["files"].pop("training"),
        lambda manifest: manifest.update(format=3),
        lambda manifest: manifest.update(format=2.0),
    ],
)
def test_a_forged_manifest_is_refused(accel, tmp_path, change):
    trainer, _ = build(accel)
    path = trainer.save(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("sha256")
    change(manifest)
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": digest}))
    before = final(trainer)
    with pytest.raises(accelcore.CheckpointError):
        trainer.resume(tmp_path)
    assert all(torch.equal(value, final(trainer)[name]) for name, value in before.items())


def test_a_state_moves_between_routes_without_changing_the_route(accel, tmp_path):
    fused, loader = build(accel, route="fused")
    run(fused, loader, epochs=1)
    fused.save(tmp_path)
    loop, loader = build(accel, route="loop")
    loop.resume(tmp_path)
    group = loop.optimizer.param_groups[0]
    assert (group["fused"], group["foreach"]) == (None, False)
    assert group["lr"] == fused.optimizer.param_groups[0]["lr"]
    assert all(state["step"] == 6 for state in loop.optimizer.state.values())
    run(loop, loader, epochs=2)


def test_a_shorter_loader_than_the_checkpoints_is_an_error(accel, tmp_path):
    trainer, loader = build(accel)
    run(trainer, loader, save_after=5, folder=tmp_path)
    other, _ = build(accel)
    other.resume(tmp_path)
    with pytest.raises(accelcore.CheckpointError, match="has only 2"):
        next(iter(other.batches(DataLoader(Noisy(8), 4))))


def test_the_same_step_saved_twice_keeps_both_and_keep_deletes_the_oldest(accel, tmp_path):
    trainer, loader = build(accel)
    first, second = trainer.save(tmp_path), trainer.save(tmp_path)
    assert first != second
    fresh, _ = build(accel)
    assert fresh.resume(tmp_path) == second
    run(trainer, loader, epochs=1)
    third = trainer.save(tmp_path, keep=2)
    assert sorted(tmp_path.iterdir()) == [second, third]
    with pytest.raises(accelcore.ConfigurationError, match="keep"):
        trainer.save(tmp_path, keep=0)


def test_many_saves_at_one_step_keep_the_newest(accel, tmp_path, caplog):
    trainer, _ = build(accel)
    saved = [trainer.save(tmp_path, keep=2) for _ in range(5)]
    assert len(set(saved)) == 5
    assert sorted(tmp_path.iterdir()) == saved[-2:]
    fresh, _ = build(accel)
    assert fresh.resume(tmp_path) == saved[-1]
    assert "another run" not in caplog.text


def test_keep_never_deletes_what_was_just_saved(accel, tmp_path, caplog):
    old, loader = build(accel)
    run(old, loader, epochs=1)
    of_another_run = old.save(tmp_path)
    fresh, _ = build(accel)
    mine = fresh.save(tmp_path, keep=1)
    assert sorted(tmp_path.iterdir()) == [mine, of_another_run]
    assert of_another_run.name in caplog.text


def test_tied_weights_stay_tied_and_extra_state_travels(accel, tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight
            self.seen = 0

        def forward(self, tokens):
            self.seen += 1
            return self.head(self.embedding(tokens)).square().mean()

        def get_extra_state(self):
            return {"seen": self.seen, "names": ("a", {1: 2.5})}

        def set_extra_state(self, state):
            self.seen, self.names = state["seen"], state["names"]

    model = Tied()
    trainer = accel.trainer(model, accel.optimizers.create("adamw", model.parameters()))
    trainer(torch.arange(7))
    trainer.save(tmp_path)
    other = Tied()
    resumed = accel.trainer(other, accel.optimizers.create("adamw", other.parameters()))
    resumed.resume(tmp_path)
    assert other.head.weight is other.embedding.weight
    assert torch.equal(other.head.weight, model.head.weight)
    assert (other.seen, other.names) == (1, ("a", {1: 2.5}))


def test_what_a_checkpoint_cannot_hold_is_named_and_nothing_is_left_behind(accel, tmp_path):
    model = nn.Linear(2, 1)
    optimizer = accel.optimizers.create("sgd", model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    trainer = accel.trainer(model, optimizer, scheduler=schedule)
    whole = trainer.save(tmp_path)
    schedule.curve = object()
    with pytest.raises(accelcore.CheckpointError, match=r"schedule\.state\.curve is a object"):
        trainer.save(tmp_path)
    del schedule.curve
    assert trainer.resume(tmp_path) == whole


def test_a_folder_that_cannot_be_written_is_an_error_of_the_family(accel, tmp_path):
    trainer, _ = build(accel)
    (tmp_path / "file").write_text("x")
    with pytest.raises(accelcore.CheckpointError, match="could be saved"):
        trainer.save(tmp_path / "file")


def test_reading_a_planted_pickle_runs_nothing(accel, tmp_path):
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

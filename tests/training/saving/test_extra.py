"""What a script adds to its checkpoints, and checkpoints that were given other names."""

from __future__ import annotations

import os
import re
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR

from accelcore import CheckpointError, ConfigurationError, Together
from accelcore.checkpoint import store
from accelcore.checkpoint.export import export


def make(accel):
    model = nn.Linear(4, 1)
    return accel.trainer(model, accel.optimizers.create("sgd", model.parameters()), loss=lambda m, b: m(b).sum())


def test_extra_is_given_back_and_kept(accel, tmp_path):
    trainer = make(accel)
    assert trainer.extra == {}
    given = {"best": 0.5, "average": {"weight": torch.ones(2)}, "at": (3, None), 7: "seven"}
    trainer.save(tmp_path, extra=given)
    trainer(torch.ones(2, 4))
    trainer.save(tmp_path)

    again = make(accel)
    again.resume(tmp_path)
    assert again.steps == 1
    assert torch.equal(again.extra["average"].pop("weight"), torch.ones(2))
    assert again.extra == {"best": 0.5, "average": {}, "at": (3, None), 7: "seven"}
    again.extra["best"] = 0.25
    again.save(tmp_path)
    last = make(accel)
    last.resume(tmp_path)
    assert last.extra["best"] == 0.25


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("has", "extra", "warns"), [(False, False, False), (True, False, True), (True, True, False)])
def test_a_scheduler_that_the_trainer_does_not_know_is_saved_by_extra_or_reported(
    accel, tmp_path, caplog, together, has, extra, warns
):
    def run(steps):
        trainer = make(accel)
        scheduler = MultiStepLR(trainer.optimizer, [1, 3]) if has else None
        saves = Together(one=trainer) if together else trainer
        if saves.resume(tmp_path) and extra:
            scheduler.load_state_dict(saves.extra["lr_scheduler"])
        for _ in range(steps):
            trainer(torch.ones(2, 4))
            if has:
                scheduler.step()
            saves.save(tmp_path, extra={"lr_scheduler": scheduler.state_dict()} if extra else None)
        return trainer.optimizer.param_groups[0]["lr"]

    begun = run(2)
    assert caplog.text.count("has a scheduler that the trainer does not know") == warns
    assert not extra or run(1) == pytest.approx(begun / 10)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (nn.Linear(2, 2), "a Linear"),
        (np.ones(2), r"a ndarray(.|\n)*from_numpy"),
        (np.datetime64(1, "s"), "a date"),
        (SimpleNamespace(shape=()), "a SimpleNamespace"),
        (SimpleNamespace(shape=np.ones(2)), "a SimpleNamespace"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_named(accel, tmp_path, value, says):
    with pytest.raises(CheckpointError, match=rf"extra\.model is {says}"):
        make(accel).save(tmp_path, extra={"model": value})


def test_scalars_of_numpy_are_saved_as_plain_numbers(accel, tmp_path):
    make(accel).save(tmp_path, extra={"values": [np.float32(0.5), np.int64(3), np.bool_(True), np.array(0.25)]})
    again = make(accel)
    again.resume(tmp_path)
    assert [(type(value), value) for value in again.extra["values"]] == [
        (float, 0.5), (int, 3), (bool, True), (float, 0.25)
    ]  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"extra=.*dict"):
        make(accel).save(tmp_path, extra=[1])


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.array])
def test_a_learning_rate_of_numpy_is_resumed(accel, tmp_path, kind):
    def begin():
        model = nn.Linear(2, 1)
        return accel.trainer(model, torch.optim.SGD(model.parameters(), lr=kind(0.5)))

    begin().save(tmp_path)
    again = begin()
    assert again.resume(tmp_path)
    assert again.optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("together", [False, True])
def test_extra_of_a_save_that_fails_is_not_kept(accel, tmp_path, together):
    trainer = make(accel)
    keeper = Together(one=trainer) if together else trainer
    keeper.save(tmp_path, extra={"best": 1.0})
    with pytest.raises(CheckpointError, match="is a set"):
        keeper.save(tmp_path, extra={"tags": {1, 2}})
    assert keeper.extra == {"best": 1.0}
    trainer(torch.ones(2, 4))
    keeper.save(tmp_path)


def test_whoever_may_read_other_new_files_may_read_a_checkpoints(accel, tmp_path):
    (other := tmp_path / "other").touch()
    checkpoint = make(accel).save(tmp_path / "kept")
    export(checkpoint, tmp_path / "model.safetensors")
    files = [tmp_path / "model.safetensors", *(file for file in checkpoint.rglob("*") if file.is_file())]
    assert len(files) > 2
    assert {file.stat().st_mode for file in files} == {other.stat().st_mode}


def test_a_file_that_cannot_be_exported_to_is_refused_and_left(accel, tmp_path, monkeypatch):
    checkpoint = make(accel).save(tmp_path / "kept")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("here")
    os.mkfifo("pipe")
    for target, says in (
        (".", "is a folder"),
        ("", r"'' is not a path(.|\n)*empty"),
        ("kept", "is a folder"),
        ("pipe", "pipe is a folder or no regular file"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            export(checkpoint, target)
    with pytest.raises(CheckpointError, match="written to file/below/it"):
        export(checkpoint, "file/below/it.safetensors")
    with pytest.raises(ConfigurationError, match=r"model\.bin does not end(.|\n)*model\.safetensors"):
        export(checkpoint, "model.bin")
    with (
        patch.object(store, "save_file", side_effect=OSError("full")),
        pytest.raises(CheckpointError, match="written to"),
    ):
        export(checkpoint, "model.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "kept", "pipe"]


@pytest.mark.parametrize("place", ["a", "b/a"])
def test_a_folder_of_folders_names_those_with_checkpoints(accel, tmp_path, caplog, place):
    trainer = make(accel)
    (tmp_path / "b").mkdir()
    trainer.save(tmp_path / place)
    for attempt in (
        lambda: export(tmp_path, "model.safetensors"),
        lambda: trainer.resume(tmp_path, must_exist=True),
    ):
        with pytest.raises(
            CheckpointError, match=rf"no checkpoint in(.|\n)*available: {re.escape(str(tmp_path / place))}\n"
        ):
            attempt()
    trainer.resume(tmp_path)
    assert f"starts at step 0 (did you mean one of these? {tmp_path / place})" in caplog.text


@pytest.mark.parametrize(
    ("saved", "asked", "level"),
    [
        ("first", "frist", "INFO"),
        ("first", "first/step-9", "WARNING"),
        ("run_2", "run_3", "INFO"),
        ("other", "first", "INFO"),
        (None, "first", "INFO"),
    ],
)
def test_a_first_start_in_a_folder_of_checkpoints_is_a_warning_that_names_it(
    accel, tmp_path, caplog, saved, asked, level
):
    if saved:
        make(accel).save(tmp_path / saved)
    caplog.set_level("INFO")
    caplog.clear()
    assert make(accel).resume(tmp_path / asked) is None
    (record,) = caplog.records
    assert record.levelname == level
    assert (f"did you mean one of these? {tmp_path / (saved or '')}" in record.message) == (level == "WARNING")


def test_a_first_start_beside_a_folder_that_this_user_may_not_read(accel, tmp_path, monkeypatch):
    (tmp_path / "frist").mkdir()

    def denied(read, *folder):  # tests may run as root, who may read everything
        if str(*folder).endswith("frist"):
            raise PermissionError(13, "Permission denied")
        return read(*folder)

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, partial(denied, getattr(os, name)))
    assert make(accel).resume(tmp_path / "first") is None
    assert make(accel).resume(tmp_path) is None


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_checkpoint_that_was_renamed_is_found_by_its_manifest(accel, tmp_path, number):
    trainer = make(accel)
    paths = []
    for _ in range(3):
        trainer(torch.ones(2, 4))
        paths.append(trainer.save(tmp_path))
    renamed = paths[number].rename(tmp_path / "best")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "manifest.json").write_text("{}")
    again = make(accel)
    assert again.resume(tmp_path) == (renamed if number == 2 else paths[2])
    assert again.steps == 3
    assert make(accel).resume(renamed) == renamed
    for path in paths:
        if path.exists():
            path.rename(tmp_path / f"old {path.name}")
    assert make(accel).resume(tmp_path).name == ("best" if number == 2 else "old step-00000003")
    trainer.save(tmp_path, keep=1)
    assert renamed.exists()


def test_a_damaged_checkpoint_is_one_whatever_its_name(accel, tmp_path):
    path = make(accel).save(tmp_path).rename(tmp_path / "best")
    (path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        make(accel).resume(tmp_path)

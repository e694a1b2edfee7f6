"""Folders of checkpoints: several runs in one, renamed ones, what cannot be deleted."""

from __future__ import annotations

import logging
import os
import shutil

import pytest
import torch
from torch import nn

import accelcore
from accelcore.checkpoint import folders


def make(accel, **options):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return accel.trainer(
        model, accel.optimizers.create("sgd", model.parameters(), lr=0.1), loss=lambda m, x: m(x).sum(), **options
    )


X = torch.ones(1, 2)


def test_two_runs_in_one_folder_keep_their_checkpoints_apart_and_both_are_told(accel, tmp_path, caplog):
    """The one that is behind, and the one that is ahead."""
    ahead, behind = make(accel), make(accel)
    for _ in range(5):
        ahead(X)
    with caplog.at_level(logging.WARNING, "accelcore"):
        far = [ahead.save(tmp_path, keep=2)]
        caplog.clear()
        near = []
        for _ in range(3):
            behind(X)
            near.append(behind.save(tmp_path, keep=2))
            assert far[0].name in caplog.text
        caplog.clear()
        for _ in range(3):
            ahead(X)
            far.append(ahead.save(tmp_path, keep=2))
            assert "another run" in caplog.text
    assert sorted(tmp_path.iterdir()) == sorted(near[-2:] + far[-2:])
    # A run that was resumed is the same run.
    went_on = make(accel)
    went_on.resume(near[-1])
    went_on(X)
    newest = went_on.save(tmp_path, keep=1)
    assert sorted(tmp_path.iterdir()) == sorted([newest, *far[-2:]])
    caplog.clear()
    third = make(accel)
    for _ in range(2):
        third.save(tmp_path)
    assert caplog.text.count(f"resuming an older one, such as {far[-1].name}") == 1


def test_older_checkpoints_that_cannot_be_deleted_are_a_warning_and_the_new_one_is_there(
    accel, tmp_path, monkeypatch, caplog
):
    trainer = make(accel)
    old = trainer.save(tmp_path)
    trainer(X)

    delete = shutil.rmtree

    def refuse(path, *args, **named):
        if path == old:
            raise PermissionError(13, "Permission denied", str(path))
        delete(path, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        new = trainer.save(tmp_path, keep=1)
    assert new.is_dir()
    assert old.is_dir()
    assert "could not be deleted" in caplog.text
    assert make(accel).resume(tmp_path) == new
    newest = trainer.save(tmp_path, keep=1)
    assert list(tmp_path.iterdir()) == [newest]


def test_a_manifest_that_is_a_device_is_damage(accel, tmp_path):
    trainer = make(accel)
    path = trainer.save(tmp_path)
    (path / "manifest.json").unlink()
    with pytest.raises(accelcore.CheckpointError, match=r"manifest\.json is missing"):
        trainer.resume(path)
    (path / "manifest.json").symlink_to("/dev/zero")
    with pytest.raises(accelcore.CheckpointError, match="damaged") as raised:
        trainer.resume(path)
    assert "not a file" in str(raised.value)


@pytest.mark.parametrize("there", ["saved", "here"])
def test_a_generator_on_one_side_only_is_named(accel, tmp_path, caplog, there):
    """As from an accelerator to the CPU, and from the CPU to an accelerator."""
    import dataclasses

    class WithMore(type(accel.runtime)):
        def rng_state(self):
            return {**super().rng_state(), "other": torch.zeros(3)}

        def set_rng_state(self, state):
            return super().set_rng_state({name: value for name, value in state.items() if name != "other"})

    more = dataclasses.replace(accel, runtime=WithMore.__new__(WithMore))
    more.runtime.__dict__.update(accel.runtime.__dict__)
    first, second = (more, accel) if there == "saved" else (accel, more)
    make(first).save(tmp_path)
    with caplog.at_level(logging.WARNING, "accelcore"):
        make(second).resume(tmp_path)
    assert "other" in caplog.text
    caplog.clear()
    make(first).resume(tmp_path)
    assert "other" not in caplog.text


def test_a_tilde_is_the_users_home_wherever_a_trainer_or_a_log_takes_a_path(accel, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    log = accelcore.Log("~/log", plot=False)
    trainer = make(accel, observers=[log])
    log.write(score=1.0)
    assert trainer.save("~/run") == trainer.resume("~/run") == tmp_path / "run" / "step-00000000"
    assert trainer.load("~/run") == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "run"]
    trainer.save("./~/run")  # which no shell expands either
    assert (tmp_path / "~" / "run").is_dir()
    with pytest.raises(accelcore.ConfigurationError, match="'~no-such-user/run' is not a path"):
        trainer.save("~no-such-user/run")


def test_the_newest_whole_one_is_found_by_steps_and_not_by_time_or_name(accel, tmp_path):
    trainer = make(accel)
    for steps in (0, 9, 10, 100):
        while trainer.steps < steps:
            trainer(X)
        trainer.save(tmp_path)
    for path in folders.checkpoints(tmp_path):
        os.utime(path, (1, 1) if path.name.endswith("100") else None)
    assert make(accel).resume(tmp_path).name == "step-00000100"

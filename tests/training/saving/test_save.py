"""Saving: what appears in the folder, what is deleted from it, what is refused."""

from __future__ import annotations

import errno

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

import accelcore
from accelcore.checkpoint import store
from accelcore.util.files import remedy_of_writing


def test_two_savers_in_one_folder_do_not_mix(accel, tmp_path, build):
    trainer, _ = build(accel)
    with store.alone(tmp_path):
        store.write_file(tmp_path, "model", {"weight": torch.ones(2)})
        with pytest.raises(accelcore.CheckpointError, match="another process is saving"):
            trainer.save(tmp_path)
        assert (tmp_path / ".incomplete" / "model.safetensors").is_file(), "the other save's files were removed"
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


def test_the_same_step_saved_twice_keeps_both_and_keep_deletes_the_oldest(accel, tmp_path, build, run):
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
    for given in ({"keep": "2"}, {"best": "0.5", "mode": "min"}):
        with pytest.raises(accelcore.ConfigurationError, match="this is text"):
            trainer.save(tmp_path, **given)


def test_many_saves_at_one_step_keep_the_newest(accel, tmp_path, caplog, build):
    trainer, _ = build(accel)
    saved = [trainer.save(tmp_path, keep=2) for _ in range(5)]
    assert len(set(saved)) == 5
    assert sorted(tmp_path.iterdir()) == saved[-2:]
    fresh, _ = build(accel)
    assert fresh.resume(tmp_path) == saved[-1]
    assert "another run" not in caplog.text


def test_keep_never_deletes_what_was_just_saved(accel, tmp_path, caplog, build, run):
    old, loader = build(accel)
    run(old, loader, epochs=1)
    of_another_run = old.save(tmp_path)
    fresh, _ = build(accel)
    mine = fresh.save(tmp_path, keep=1)
    assert sorted(tmp_path.iterdir()) == [mine, of_another_run]
    assert of_another_run.name in caplog.text


def test_what_a_checkpoint_cannot_hold_is_named_and_nothing_is_left_behind(accel, tmp_path):
    model = nn.Linear(2, 1)
    optimizer = accel.optimizers.create("sgd", model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    trainer = accel.trainer(model, optimizer, scheduler=schedule)
    whole = trainer.save(tmp_path)
    schedule.curve = object()
    with pytest.raises(accelcore.CheckpointError, match=r"schedule\.state\.curve is an object"):
        trainer.save(tmp_path)
    del schedule.curve
    assert trainer.resume(tmp_path) == whole


def test_a_folder_that_cannot_be_written_is_an_error_of_the_family(accel, tmp_path, build):
    trainer, _ = build(accel)
    (tmp_path / "file").write_text("x")
    with pytest.raises(accelcore.CheckpointError, match="could be saved"):
        trainer.save(tmp_path / "file")
    denied = remedy_of_writing(PermissionError(errno.EACCES, "no"))
    assert denied.startswith("name a folder that you may write to"), "its parent may be what is not writable"
    missing = remedy_of_writing(FileNotFoundError(errno.ENOENT, "no"))
    assert missing.startswith("name another folder: "), "one that cannot be created, such as one in /proc"
    assert remedy_of_writing(SafetensorError("I/O error: No space left on device (os error 28)")) == "free disk space"

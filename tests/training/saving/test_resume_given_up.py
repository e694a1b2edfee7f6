"""A checkpoint of which only some parts were restored ends the training, on all ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import accelcore
from tests.training.saving.test_resume_all_or_nothing import KINDS, make, snapshot, train

SCRIPT = Path(__file__).with_name("resume_ranks.py")


def broken(*_):
    raise RuntimeError("not today")


def break_late(owner):
    """Its state is loaded, and then it raises."""
    load = owner.load_state_dict

    def raises_late(state):
        load(state)
        broken()

    owner.load_state_dict = raises_late


BREAK = {
    "a hook before the optimizer's": lambda trainer: trainer.optimizer.register_load_state_dict_pre_hook(broken),
    "a hook after the optimizer's": lambda trainer: trainer.optimizer.register_load_state_dict_post_hook(broken),
    "the schedule": lambda trainer: setattr(trainer.scheduler, "load_state_dict", broken),
    "the schedule, late": lambda trainer: break_late(trainer.scheduler),
    "a hook of the model": lambda trainer: trainer.model.body[3].register_load_state_dict_pre_hook(broken),
    "a module": lambda trainer: setattr(trainer.model, "set_extra_state", broken),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", BREAK)
def test_a_trainer_whose_restoring_fails_midway_trains_no_more(accel, tmp_path, kind, what):
    trainer, loader = make(accel, kind)
    train(trainer, loader, 4)  # a step, and a window that is open
    trainer.save(tmp_path)
    train(trainer, loader, 1)
    BREAK[what](trainer)
    with pytest.raises(accelcore.CheckpointError, match=r"in part[\s\S]*not today"):
        trainer.resume(tmp_path)
    for use in (
        lambda: train(trainer, loader, 1), trainer.update, lambda: trainer.backward(torch.ones(())),
        lambda: trainer.save(tmp_path), lambda: trainer.resume(tmp_path),
    ):  # fmt: skip
        with pytest.raises(accelcore.TrainingError, match=r"cannot go on[\s\S]*restored in part"):
            use()
    again, loader = make(accel, kind)
    assert again.resume(tmp_path) is not None
    train(again, loader, 3)


def test_an_interrupt_while_restoring_is_raised_as_it_is_and_ends_the_training(accel, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    trainer, loader = make(accel, "flat")
    trainer.save(tmp_path)
    trainer.scheduler.load_state_dict = interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.resume(tmp_path)
    with pytest.raises(accelcore.TrainingError, match="restored in part"):
        train(trainer, loader, 1)


def test_a_loss_scale_that_does_not_load_is_refused_before_anything_changes(accel, tmp_path):
    trainer, loader = make(accel, "flat")
    train(trainer, loader, 4)
    trainer.save(tmp_path)
    train(trainer, loader, 1)
    before, load = snapshot(accel, trainer), trainer.scaler.load_state_dict
    trainer.scaler.load_state_dict = broken
    with pytest.raises(accelcore.CheckpointError, match="not today"):
        trainer.resume(tmp_path)
    assert snapshot(accel, trainer) == before
    trainer.scaler.load_state_dict = load
    train(trainer, loader, 1)


@pytest.fixture(scope="module")
def found(fork_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    ended = [rank.finish() for rank in fork_ranks(SCRIPT, folder)]
    assert [rank.returncode for rank in ended] == [0, 0], "\n".join(rank.stderr for rank in ended)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("what", ["schedule", "optimizer"])
def test_what_fails_on_one_rank_ends_the_training_on_all(found, what, parallel):
    ranks = [rank[f"{what}, {parallel}"] for rank in found]
    assert [rank["raised"][0] for rank in ranks] == ["CheckpointError", "CheckpointError"]
    assert "another rank could not restore" in ranks[0]["raised"][1]
    assert "only here" in ranks[1]["raised"][1]
    for rank in ranks:
        assert rank["then"][0] == "TrainingError"
        assert "cannot go on" in rank["then"][1]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_what_does_not_fit_on_one_rank_changes_nothing_on_any(found, parallel):
    ranks = [rank[f"scaler, {parallel}"] for rank in found]
    assert [rank["raised"][0] for rank in ranks] == ["CheckpointError", "CheckpointError"]
    assert [rank["unchanged"] for rank in ranks] == [True, True]
    assert [rank["then"] for rank in ranks] == [[], []]

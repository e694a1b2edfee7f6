"""Restoring that fails midway is undone, on all ranks; what cannot be undone trains no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import accelcore
from tests.training.test_resume_all_or_nothing import KINDS, make, snapshot, train

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
    "the scaler": lambda trainer: setattr(trainer.scaler, "load_state_dict", broken),
    "a hook of the model": lambda trainer: trainer.model.body[3].register_load_state_dict_pre_hook(broken),
    "a module": lambda trainer: setattr(trainer.model, "set_extra_state", broken),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", BREAK)
def test_whatever_raises_and_goes_on_raising_leaves_all_as_it_was(accel, tmp_path, kind, what):
    trainer, loader = make(accel, kind)
    twin, its = make(accel, kind)
    train(trainer, loader, 4)  # a step, and a window that is open
    trainer.save(tmp_path / "then")
    train(trainer, loader, 4)
    trainer.save(tmp_path / "now")
    BREAK[what](trainer)
    before = snapshot(accel, trainer)
    with pytest.raises(accelcore.CheckpointError, match="not today"):
        trainer.resume(tmp_path / "then")
    assert snapshot(accel, trainer) == before
    losses = train(trainer, loader, 6)
    twin.resume(tmp_path / "now")
    assert train(twin, its, 6) == losses


def test_what_cannot_be_undone_trains_no_more(accel, tmp_path):
    trainer, loader = make(accel, "flat")
    train(trainer, loader, 3)
    trainer.save(tmp_path)

    def load(state):
        trainer.scheduler.last_epoch += 100
        broken()

    trainer.scheduler.load_state_dict = load
    with pytest.raises(accelcore.CheckpointError, match="could not be undone"):
        trainer.resume(tmp_path)
    for use in (
        lambda: train(trainer, loader, 1), trainer.update, lambda: trainer.backward(torch.ones(())),
        lambda: trainer.save(tmp_path), lambda: trainer.resume(tmp_path),
    ):  # fmt: skip
        with pytest.raises(accelcore.TrainingError, match="cannot go on: a checkpoint was restored in part"):
            use()


def test_a_weight_that_the_script_wrote_before_is_not_lost_to_its_master(accel, tmp_path):
    model = nn.Linear(2, 1, bias=False).bfloat16()
    trainer = accel.trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), loss=lambda m, b: m(b).sum())
    batch = torch.ones(1, 2, dtype=torch.bfloat16)
    trainer(batch)
    trainer.save(tmp_path)
    nn.init.constant_(model.weight, 3.0)
    model.register_load_state_dict_post_hook(broken)
    with pytest.raises(accelcore.CheckpointError):
        trainer.resume(tmp_path)
    trainer(batch)
    assert model.weight.tolist() == [[3.0, 3.0]]


@pytest.fixture(scope="module")
def found(fork_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    ended = [rank.finish() for rank in fork_ranks(SCRIPT, folder)]
    assert [rank.returncode for rank in ended] == [0, 0], "\n".join(rank.stderr for rank in ended)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("what", ["schedule", "optimizer"])
def test_what_fails_on_one_rank_is_undone_on_all(found, what, parallel):
    ranks = [rank[f"{what}, {parallel}"] for rank in found]
    assert [rank["raised"][0] for rank in ranks] == ["CheckpointError", "CheckpointError"]
    assert "another rank could not resume" in ranks[0]["raised"][1]
    assert "only here" in ranks[1]["raised"][1]
    assert [rank["undone"] for rank in ranks] == [True, True]
    assert [rank["then"] for rank in ranks] == [[], []]
    assert ranks[0]["model"] == ranks[1]["model"]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_what_one_rank_cannot_undo_ends_the_training_on_all(found, parallel):
    for rank in found:
        said = rank[f"for good, {parallel}"]
        assert said["raised"][0] == "CheckpointError"
        assert "could not be undone" in said["raised"][1]
        assert said["then"][0] == "TrainingError"
        assert "cannot go on" in said["then"][1]

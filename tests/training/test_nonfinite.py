"""NaN and inf: parameters that have them are reported in time and never saved, or the update is skipped."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from toys import OPTIMIZERS, data, loss_of

import accelcore
from accelcore import Policy, TrainingError
from tests.training.nonfinite_ranks import BAD, STRATEGIES

NAN = (torch.full((8, 6), math.nan), torch.zeros(8, 2))


def plain(seed=0):
    """A model without a BatchNorm, whose statistics a NaN would spoil."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))


def make(accel, made="ours", **options):
    model = options.pop("model", None) or plain()
    return accel.trainer(model, OPTIMIZERS[made](accel, model.parameters()), **{"loss": loss_of, **options})


@pytest.mark.parametrize("made", OPTIMIZERS)
@pytest.mark.parametrize(
    "options",
    [{}, {"flat": True}, {"precision": "bf16"}, {"precision": "bf16-true"}, {"clip_norm": 1.0}, {"loss_scale": 8.0}],
    ids=str,
)
def test_the_step_and_the_first_parameter_are_named(accel, made, options):
    if options.get("precision") == "bf16-true":
        options = {**options, "loss": lambda model, batch: mse_loss(model(batch[0].bfloat16()).float(), batch[1])}
    trainer = make(accel, made, **options)
    for batch in data(5):
        trainer(batch)
    with pytest.raises(TrainingError, match=r"the parameter '0\.weight' has(.|\n)*step 6: nan"):
        list(map(trainer, (NAN, NAN, *data(20))))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_calls_of_ones_own_are_checked_too(accel, accumulate):
    trainer = make(accel, accumulate=accumulate)

    def step(batch):
        trainer.backward(loss_of(trainer.forward, batch))
        trainer.update()

    for batch in data(4 * accumulate):
        step(batch)
    with pytest.raises(TrainingError, match="step 5: nan"):
        list(map(step, (NAN, *data(20 * accumulate))))


def test_an_epoch_does_not_end_and_a_checkpoint_is_not_written_with_nan(accel, tmp_path):
    trainer = make(accel)
    good = trainer.save(tmp_path)
    with pytest.raises(TrainingError, match=r"after step 6(.|\n)*step 5: nan"):
        list(map(trainer, trainer.batches([*data(4), NAN, *data(1)])))
    with pytest.raises(TrainingError, match=r"'0\.weight'"):
        trainer.save(tmp_path)
    with pytest.raises(TrainingError, match=r"'0\.weight'"):
        accelcore.Together(one=trainer).save(tmp_path)
    assert trainer.resume(tmp_path, must_exist=True) == good
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith("step")] == [good.name]
    for batch in trainer.batches(data(3)):
        trainer(batch)
    trainer.save(tmp_path)


def test_a_row_that_later_losses_do_not_see_is_found(accel):
    trainer = make(accel, model=nn.EmbeddingBag(5, 3), loss=lambda m, b: (m(b[0]) * b[1]).sum())
    good = torch.tensor([[1, 2]]), torch.tensor(1.0)
    list(map(trainer, [good, good]))
    trainer((torch.tensor([[4]]), torch.tensor(math.inf)))
    with pytest.raises(TrainingError, match=r"the parameter 'weight'(.|\n)*step 3: nan"):
        list(map(trainer, [good] * 20))


def test_nothing_is_checked_if_that_is_asked_for(accel, tmp_path):
    trainer = make(accel, on_nonfinite=None)
    for batch in trainer.batches([NAN, *data(8)]):
        trainer(batch)
    assert trainer.model[0].weight.isnan().all()
    trainer.save(tmp_path)


def test_what_harms_no_parameter_is_allowed(accel, tmp_path):
    """Finite values whose norm overflows, and a loss of inf with finite gradients."""
    model = plain()
    with torch.no_grad():
        model[2].weight.fill_(1e30)
    trainer = make(accel, model=model, loss=lambda m, b: (m[0](b[0]) * 1e-3).sum() + torch.tensor(math.inf))
    for batch in trainer.batches(data(4)):
        trainer(batch)
    trainer.save(tmp_path)


def fused(accel, members):
    return torch.optim.AdamW(members, lr=0.05, eps=1e-3, fused=True)


@pytest.mark.parametrize("made", [*OPTIMIZERS.values(), fused])
@pytest.mark.parametrize(
    "options", [{}, {"flat": True}, {"clip_norm": 0.1}, {"loss_scale": 8.0}, {"accumulate": 2}], ids=str
)
def test_an_update_with_nan_is_skipped_as_if_its_window_had_not_been(accel, made, options):
    def trained(batches):
        model = plain()
        trainer = accel.trainer(model, made(accel, model.parameters()), loss=loss_of, on_nonfinite="skip", **options)
        for batch in trainer.batches(batches):
            trainer(batch)
        return list(model.parameters()), trainer

    before, after = data(4), data(6)[4:]
    window = [NAN, *data(options.get("accumulate", 1) - 1)]
    found, trainer = trained([*before, *window, *after])
    expected, without = trained([*before, *after])
    assert all(map(torch.equal, found, expected))
    assert (trainer.skipped, without.skipped) == (1, 0)
    assert trainer.steps == without.steps + 1


def test_skipping_needs_no_other_scale(accel, tmp_path):
    trainer = make(accel, on_nonfinite="skip", precision=Policy(loss_scale="dynamic"))
    assert trainer.scaler.state_dict()["scale"] == 65536.0
    trainer = make(accel, on_nonfinite="skip")
    for batch in data(3):
        trainer(batch)
    assert trainer.scaler.state_dict()["scale"] == 1.0
    trainer.save(tmp_path)
    make(accel, on_nonfinite="skip").resume(tmp_path, must_exist=True)


def test_another_word_is_refused(accel):
    with pytest.raises(accelcore.ConfigurationError, match=r"on_nonfinite='stop'"):
        make(accel, on_nonfinite="stop")


@pytest.fixture(scope="module")
def found(fork_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("nonfinite")
    ended = [rank.finish() for rank in fork_ranks(Path(__file__).with_name("nonfinite_ranks.py"), folder)]
    assert [rank.returncode for rank in ended] == [0, 0], "\n".join(rank.stderr for rank in ended)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("parallel", STRATEGIES)
def test_all_ranks_raise_in_the_same_step(found, parallel):
    said = [rank[parallel] for rank in found]
    assert said[0]["steps"] == said[1]["steps"] < 20
    assert all("NaN" in one["raised"] and one["unsaved"] for one in said)
    assert f"first loss on this rank that was not finite is that of step {BAD + 1}: nan" in said[0]["raised"]
    assert f"first loss on this rank that was not finite is that of step {BAD}: nan" in said[1]["raised"]
    assert [one["skipped"] for one in said] == [1, 1]


@pytest.mark.parametrize("parallel", STRATEGIES)
def test_a_plain_backward_pass_beside_the_trainer_is_refused_under_every_strategy(found, parallel):
    for rank in found:
        assert "the parameter '" in rank[parallel]["beside"]
        assert "add the losses up" in rank[parallel]["beside"]


@pytest.mark.parametrize("steps", [3, 70])
def test_a_loss_that_is_nan_and_changes_no_parameter_is_reported_once(accel, tmp_path, caplog, steps):
    trainer = make(accel, loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), torch.full((8,), -100)))
    list(map(trainer, data(steps)))
    for _ in range(2):
        trainer.save(tmp_path)
    assert trainer.model[0].weight.isfinite().all()
    assert caplog.text.count("the loss of step 1 is nan, and the parameters are finite") == 1

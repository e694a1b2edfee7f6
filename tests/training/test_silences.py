"""What would train nothing, or something else than the script says, is refused or reported."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from toys import OPTIMIZERS, data, loss_of, net

import accelcore


def make(accel, model=None, lr=0.1, **options):
    model = net() if model is None else model
    return accel.trainer(
        model, accel.optimizers.create("sgd", model.parameters(), lr=lr), **{"loss": loss_of, **options}
    )


@pytest.mark.parametrize("name", ["scheduler", "model", "optimizer", "scaler", "clip_norm", "precision"])
def test_what_a_trainer_was_made_with_cannot_be_replaced(accel, name):
    trainer = make(accel)
    before = getattr(trainer, name, None)
    with pytest.raises(accelcore.ConfigurationError, match=rf"trainer\.{name} (.|\n)*accel\.trainer"):
        setattr(trainer, name, StepLR(trainer.optimizer, 1))
    assert getattr(trainer, name, None) is before


@pytest.mark.parametrize("name", ["lr", "learning_rate"])
def test_a_learning_rate_of_the_trainer_is_refused_because_only_the_optimizer_has_one(accel, name):
    with pytest.raises(accelcore.ConfigurationError, match=r"trainer\.optimizer\.param_groups"):
        setattr(make(accel), name, 0.5)


class Loss(nn.Module):
    """A criterion with a parameter of its own, which a model may hold, too."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, model, batch):
        return loss_of(model, batch) * self.temperature


@pytest.mark.parametrize("place", ["beside the model", "in the model", "frozen"])
def test_parameters_of_the_loss_that_the_model_lacks_are_reported(accel, caplog, place):
    model, loss = net(), Loss().requires_grad_(place != "frozen")
    if place == "in the model":
        model.register_parameter("temperature", loss.temperature)
    make(accel, model, loss=loss)
    assert ["'temperature'" in line for line in caplog.messages] == [True] * (place == "beside the model")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_backward_without_update_is_reported_when_the_epoch_ends(accel, caplog, accumulate):
    trainer = make(accel, accumulate=accumulate)
    for batch in trainer.batches(data(3)):
        trainer.backward(loss_of(trainer.forward, batch))
        trainer.update()
    assert not caplog.records
    batches = list(trainer.batches(data(3)))
    caplog.clear()
    for number, _ in enumerate(trainer.batches(data(3))):
        trainer.backward(loss_of(trainer.forward, batches[number]))
        if number < accumulate:
            trainer.update()
    assert "trainer.update() was not called" in caplog.text


@pytest.mark.parametrize(
    ("accumulate", "says"),
    [
        (1, r"no weight(.|\n)*call trainer\.update\(\) after each"),
        (2, r"for a second batch(.|\n)*call trainer\.update\(\) after each batch"),
    ],
)
def test_an_epoch_without_update_is_an_error_and_drops_its_gradients(accel, accumulate, says):
    trainer, other = make(accel, accumulate=accumulate), make(accel, accumulate=accumulate)
    other.model.load_state_dict(trainer.model.state_dict())
    batches = trainer.batches(data(3))
    with pytest.raises(accelcore.TrainingError, match=says):
        deque(trainer.backward(loss_of(trainer.forward, batch)) for batch in batches)
    assert all(map(torch.equal, trainer.model.parameters(), other.model.parameters()))
    batch = next(iter(data(3)))
    for each in (trainer, other):  # none of the dropped gradients is left
        each.backward(loss_of(each.forward, batch))
        each.update()
        each.flush()
    assert all(map(torch.equal, trainer.model.parameters(), other.model.parameters()))


def test_update_at_the_end_of_windows_only_is_refused_and_several_losses_of_a_batch_are_not(accel, tmp_path):
    trainer = make(accel, accumulate=2)

    def train(*updates):
        for number, batch in enumerate(trainer.batches(data(4))):
            for _ in range(2):
                trainer.backward(loss_of(trainer.forward, batch))
            if number in updates:
                trainer.update()
            if number == 2:
                trainer.save(tmp_path)
        return trainer.steps

    assert train(0, 1, 2, 3) == 2
    with pytest.raises(accelcore.TrainingError, match="for a second batch"):
        train(1, 3)
    trainer.resume(tmp_path)  # within a window; the last batch is left
    assert trainer.steps == 1
    assert train(0) == 2


def test_a_checkpoint_of_gradients_without_any_update_is_refused(accel, tmp_path):
    trainer, batches = make(accel), data(3)
    trainer.save(tmp_path)
    for _ in range(2):
        for batch in batches:
            trainer.backward(loss_of(trainer.forward, batch))
        with pytest.raises(accelcore.TrainingError, match=r"save\(\)(.|\n)*no weight(.|\n)*call trainer\.update\(\)"):
            trainer.save(tmp_path)
    trainer.update()
    assert trainer.save(tmp_path).name.endswith("1")


def make_by(accel, kind):
    model = net()
    create = torch.optim.SGD if kind == "torch" else accel.optimizers.create
    return accel.trainer(model, create(*[*(() if kind == "torch" else ["sgd"]), model.parameters()], lr=0.1))


@pytest.mark.parametrize("kind", ["torch", "by name"])
def test_a_loop_that_trains_without_its_trainer_is_reported_or_refused(accel, caplog, kind):
    trainer = make_by(accel, kind)

    def train():
        for batch in trainer.batches(data(3)):
            loss_of(trainer.model, batch).backward()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()

    if kind == "torch":
        train()
        assert "instead of loss.backward() and optimizer.step()" in caplog.text
        return
    with pytest.raises(accelcore.TrainingError, match=r"optimizer\.step\(\) was called(.|\n)*call trainer\(batch\)"):
        train()


def test_steps_of_the_optimizer_between_two_backward_passes_are_reported_once(accel, caplog):
    trainer = make_by(accel, "torch")
    for batch in data(3):
        trainer.backward(loss_of(trainer.forward, batch))
        trainer.backward(loss_of(trainer.forward, batch))
        trainer.update()
    assert "between two calls" not in caplog.text
    for batch in data(3):
        trainer.backward(loss_of(trainer.forward, batch))
        trainer.optimizer.step()
    assert caplog.text.count("call it instead of optimizer.step()") == 1


@pytest.mark.parametrize("kind", ["torch", "by name"])
def test_epochs_without_a_step_are_reported_once_and_others_not_at_all(accel, caplog, tmp_path, kind):
    trainer, other = make_by(accel, kind), make_by(accel, kind)
    for _ in range(2):
        for batch in trainer.batches(data(3)):
            loss_of(trainer.model, batch)
    assert caplog.text.count("without a step of a trainer") == 1
    trainer.save(tmp_path)
    caplog.clear()
    read = make_by(accel, kind)
    for batch in read.batches(data(3)):  # as a GAN's generator trains on the batches of its critic
        other.backward(loss_of(other.forward, batch))
        other.update()
    for _ in read.batches(data(1)):
        read.resume(tmp_path)
        break
    read.save(tmp_path)
    assert "without a step" not in caplog.text


def test_the_empty_rest_of_an_epoch_after_a_resume_is_no_epoch_without_a_step(accel, caplog, tmp_path):
    trainer = make_by(accel, "by name")
    for number, batch in enumerate(trainer.batches(data(3)), start=1):
        trainer.backward(loss_of(trainer.forward, batch))
        trainer.update()
        if number == 3:
            trainer.save(tmp_path)
    resumed = make_by(accel, "by name")
    resumed.resume(tmp_path)
    assert list(resumed.batches(data(3))) == []
    assert resumed.epoch == 1
    assert "without a step" not in caplog.text


def test_a_model_that_is_trained_in_evaluation_mode_is_reported_once(accel, caplog):
    says, (batch,) = "the model is trained in evaluation mode", data(1)
    pretrained = make(accel, net().eval())
    for _ in range(2):
        pretrained(batch)
    assert caplog.text.count(says) == 1
    caplog.clear()
    kept = make(accel)
    kept(batch)
    next(iter(kept.model.children())).eval()
    kept(batch)
    kept.model.eval()
    kept.forward(batch[0])  # its evaluation
    kept.model.train()
    kept.backward(loss_of(kept.forward, batch))
    kept.update()
    assert says not in caplog.text
    for _ in range(2):
        kept.model.eval()
        kept(batch)
        kept(batch)
        kept.model.train()
        kept(batch)
    assert caplog.text.count(says) == 1


def test_an_epoch_may_begin_in_evaluation_mode_if_it_trains(accel):
    trainer = make(accel)
    for _ in trainer.epochs(2):
        for batch in trainer.batches(data(3)):
            trainer.model.train()
            trainer(batch)
        trainer.model.eval()
    assert trainer.steps == 6


def test_a_step_within_an_evaluation_that_was_left_says_what_keeps_gradients_off(accel):
    trainer = make(accel)
    batches = list(data(3))
    evaluation = trainer.evaluate(data(3))
    next(evaluation)
    with pytest.raises(accelcore.TrainingError, match=r"gradients are off(.|\n)*trainer\.evaluate\(loader\)"):
        trainer(batches[0])
    del evaluation
    trainer(batches[0])


@pytest.mark.parametrize(
    ("loader", "says"),
    [(DataLoader(torch.ones(3, 6), 4, drop_last=True), "drop_last=True"), ([], "its data is empty")],
    ids=["drop_last", "empty"],
)
def test_an_epoch_without_batches_is_an_error(accel, loader, says):
    with pytest.raises(accelcore.TrainingError, match=rf"no batches(.|\n)*{says}"):
        list(make(accel).batches(loader))


def test_a_second_epoch_of_an_iterator_is_an_error(accel):
    trainer, used_up = make(accel), iter(data(2))
    with pytest.raises(accelcore.TrainingError, match=r"no batches(.|\n)*gives its batches once(.|\n)*pass a list"):  # noqa: PT012
        for _ in trainer.epochs(2):
            for batch in trainer.batches(used_up):
                trainer(batch)
    assert trainer.steps == 2


def test_a_folder_without_a_checkpoint_is_reported_or_refused(accel, tmp_path, caplog):
    caplog.set_level("INFO")
    trainer, there = make(accel), tmp_path / "there"
    assert trainer.resume(tmp_path / "elsewhere") is None
    assert str(tmp_path / "elsewhere") in caplog.text
    with pytest.raises(accelcore.CheckpointError, match=r"no checkpoint(.|\n)*must_exist"):
        trainer.resume(there, must_exist=True)
    both = accelcore.Together(one=trainer)
    with pytest.raises(accelcore.CheckpointError, match="no checkpoint"):
        both.resume(there, must_exist=True)
    caplog.clear()
    assert trainer.save(there) == trainer.resume(there, must_exist=True)
    (record,) = caplog.records
    assert str(there) in record.getMessage()


@pytest.mark.parametrize("made", OPTIMIZERS)
def test_trainable_parameters_without_an_optimizer_are_refused_unless_frozen(accel, made):
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    optimizer = OPTIMIZERS[made](accel, model[1].parameters())
    with pytest.raises(accelcore.ConfigurationError, match=r"'0\.weight'(.|\n)*requires_grad_\(False\)"):
        accel.trainer(model, optimizer, loss=loss_of)
    model[0].requires_grad_(False)
    trainer = accel.trainer(model, optimizer, loss=loss_of)
    trainer(data(1)[0])
    model[0].requires_grad_(True)
    with pytest.raises(accelcore.ConfigurationError, match=r"'0\.weight'"):
        trainer.refresh()


@pytest.mark.parametrize("scheduled", [False, True])
def test_another_learning_rate_than_the_checkpoints_is_reported(accel, tmp_path, caplog, scheduled):
    def trained(lr):
        model = net()
        optimizer = accel.optimizers.create("sgd", model.parameters(), lr=lr)
        scheduler = StepLR(optimizer, 1, gamma=0.5) if scheduled else None
        return accel.trainer(model, optimizer, loss=loss_of, scheduler=scheduler)

    trainer = trained(0.1)
    for batch in trainer.batches(data(2)):
        trainer(batch)
    trainer.save(tmp_path)
    trained(0.1).resume(tmp_path)
    assert "rate is" not in caplog.text
    again = trained(0.3)
    again.resume(tmp_path)
    assert "rate is 0.3, and the checkpoint's is 0.1" in caplog.text
    assert again.optimizer.param_groups[0]["lr"] == trainer.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("options", [{"flat": 1}, {"flat": 0}, {"flat": "auto"}, {"graph": 1}, {"graph": "yes"}])
def test_a_switch_takes_no_number(accel, options):
    with pytest.raises(accelcore.ConfigurationError, match="True"):
        make(accel, **options)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("own", [False, True], ids=["trainer(batch)", "own step"])
def test_a_save_before_the_step_on_a_batch_is_reported_once_and_one_after_it_not(
    accel, caplog, tmp_path, accumulate, own
):
    def train(trainer, batch):
        if own:
            trainer.backward(loss_of(trainer.forward, batch))
            trainer.update()
        else:
            trainer(batch)

    trainer, says = make(accel, accumulate=accumulate), "a run that resumes from this checkpoint skips the batch"
    trainer.save(tmp_path)
    for batch in trainer.batches(data(3)):
        train(trainer, batch)
        trainer.save(tmp_path)
        break
    trainer.resume(tmp_path)
    trainer.save(tmp_path)
    for batch in trainer.batches(data(3)):
        train(trainer, batch)
        trainer.save(tmp_path)
    trainer.save(tmp_path)
    assert says not in caplog.text
    for batch in trainer.batches(data(3)):
        trainer.save(tmp_path)
        train(trainer, batch)
    assert caplog.text.count(says) == 1


@pytest.mark.parametrize("precision", ["bf16", "O1", "fp32"])
@pytest.mark.parametrize("way", ["none", "trainer's", "torch's", "whole"])
def test_a_step_outside_of_autocast_is_reported_once(accel, caplog, precision, way):
    trainer = make(accel, precision=precision)
    context = {"trainer's": trainer.autocast, "torch's": lambda: torch.autocast("cpu", torch.bfloat16)}.get(way)
    for batch in data(3):
        if way == "whole":
            trainer(batch)
            continue
        with context() if context else nullcontext():
            loss = loss_of(trainer.forward, batch)
        trainer.backward(loss)
        trainer.update()
    lines = [record.message for record in caplog.records if "with trainer.autocast():" in record.message]
    assert len(lines) == (way == "none" and precision != "fp32")


def test_a_dataset_is_no_loader(accel):
    trainer = make(accel)
    for read in (trainer.batches, trainer.evaluate):
        with pytest.raises(accelcore.ConfigurationError, match=r"TensorDataset.*rows(.|\n)*DataLoader"):
            next(iter(read(TensorDataset(torch.randn(8, 6), torch.randn(8, 2)))))


def test_another_option_than_the_checkpoints_is_reported(accel, tmp_path, caplog):
    def trained(decay):
        model = net()
        optimizer = accel.optimizers.create("adamw", model.parameters(), lr=0.1, weight_decay=decay)
        return accel.trainer(model, optimizer, loss=loss_of)

    trainer = trained(0.0)
    for batch in trainer.batches(data(2)):
        trainer(batch)
    trainer.save(tmp_path)
    again = trained(0.5)
    again.resume(tmp_path)
    assert "weight_decay is 0.5, and the checkpoint's is 0.0" in caplog.text
    assert again.optimizer.param_groups[0]["weight_decay"] == 0.0

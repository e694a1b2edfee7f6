"""Observers are told what is so, and change nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accelcore
from accelcore.precision.policy import Policy
from accelcore.training.observers import Observer


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)))


def data(count):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(count)]


def loss_of(model, batch):
    return mse_loss(model(batch[0]), batch[1])


class Everything(Observer):
    def __init__(self):
        self.told = []

    def loss(self, loss):
        self.told.append(("loss", loss.item(), loss.requires_grad))

    def gradient_norm(self, norm):
        self.told.append(("norm", norm.item()))

    def overflow(self, found):
        self.told.append(("overflow", found.item()))

    def step(self, steps):
        self.told.append(("step", steps))

    def output(self, module, output):
        self.told.append(("output", module, output.detach().clone()))

    def of(self, kind):
        return [what[1] for what in self.told if what[0] == kind]


def make(accel, observers, **options):
    model = net()
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=0.05, eps=1e-3)
    return accel.trainer(model, optimizer, loss=loss_of, observers=observers, **options)


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "per tensor"])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("loss_scale", [None, 128.0, "dynamic"])
@pytest.mark.parametrize("calls", ["one", "three"])
def test_each_method_is_told_what_torch_finds(accel, flat, clip_norm, loss_scale, calls):
    observer = Everything()
    trainer = make(accel, [observer], flat=flat, clip_norm=clip_norm, loss_scale=loss_scale, accumulate=2)
    hand = net()
    optimizer = torch.optim.AdamW(hand.parameters(), lr=0.05, eps=1e-3)
    losses, norms = [], []
    for number, batch in enumerate(data(6)):
        if calls == "one":
            trainer(batch)
        else:
            with trainer.autocast():
                loss = loss_of(trainer.forward, batch)
            trainer.backward(loss)
            trainer.update()
        loss = loss_of(hand, batch)
        losses.append(loss.item())
        (loss / 2).backward()
        if number % 2:
            norms.append(nn.utils.clip_grad_norm_(hand.parameters(), clip_norm or 1e9).item())
            optimizer.step()
            optimizer.zero_grad()
    assert observer.of("loss") == pytest.approx(losses, rel=1e-5)
    assert not any(what[2] for what in observer.told if what[0] == "loss")
    assert observer.of("norm") == pytest.approx(norms, rel=1e-5)
    assert min(norms) > 0.05, "clipping did nothing"
    assert observer.of("overflow") == ([0.0] * 3 if loss_scale == "dynamic" else [])
    assert observer.of("step") == [1, 2, 3]
    assert [what[1] for what in observer.told[:4]] == ["0", "1.0", "1.1", "1"]
    torch.testing.assert_close(observer.told[0][2], net()[0](data(1)[0][0]))


def test_an_overflow_is_told_and_its_window_is_skipped(accel):
    observer = Everything()
    trainer = make(accel, [observer], loss_scale="dynamic")
    feed = data(3)
    feed[1] = (feed[1][0] * float("inf"), feed[1][1])
    for batch in feed:
        trainer(batch)
    assert observer.of("overflow") == [0.0, 1.0, 0.0]
    assert observer.of("step") == [1, 2, 3]
    assert trainer.skipped == 1


def test_the_norm_is_that_of_the_gradients_masters_get(accel):
    observer = Everything()
    trainer = make(accel, [observer], precision=Policy(model_dtype="bfloat16"), loss_scale=1024.0, clip_norm=1e-3)
    batch = tuple(part.bfloat16() for part in data(1)[0])
    trainer(batch)
    hand = net().bfloat16()
    loss_of(hand, batch).backward()
    exact = torch.cat([p.grad.double().flatten() for p in hand.parameters()]).norm().item()
    assert observer.of("norm") == [pytest.approx(exact, rel=0.02)]


class Course(Observer):
    """The events around data, and what the trainer is seen to be in them."""

    measures_norm = False

    def __init__(self):
        self.told = []

    def begin(self, trainer):
        self.trainer = trainer

    def epoch_begin(self, epoch):
        self.told.append(f"epoch {epoch}")

    def batch(self, batch):
        self.told.append(f"{len(batch[0])} rows")

    def loss(self, loss):
        self.told.append("loss")

    def gradient_norm(self, norm):
        self.told.append("norm")

    def step(self, steps):
        assert steps == self.trainer.steps
        self.told.append(f"step {steps}")

    def epoch_end(self, epoch):
        self.told.append(f"end {epoch}")


def test_data_and_epochs_are_told_in_order_also_after_a_resume(accel, tmp_path):
    course, rest = Course(), Course()
    trainer = make(accel, [course], accumulate=2)
    for _ in trainer.epochs(2):
        for number, batch in enumerate(trainer.batches(data(3))):
            trainer(batch)
            if (trainer.epoch, number) == (1, 0):
                trainer.save(tmp_path)
    micro, last = ["4 rows", "loss"], ["step 2", "end 0"]
    of_first = ["epoch 0", *micro, *micro, "step 1", *micro, *last]
    of_second = [*micro, *micro, "step 3", *micro, "step 4", "end 1"]
    assert course.told == [*of_first, "epoch 1", *of_second]
    resumed = make(accel, [rest], accumulate=2)
    resumed.resume(tmp_path)
    for batch in resumed.batches(data(3)):
        resumed(batch)
    assert rest.told == ["epoch 1", *of_second[2:]]


def test_a_norm_that_nothing_measures_is_not_told(accel):
    course = Course()
    trainer = make(accel, [course], clip_norm=1.0)
    trainer(data(1)[0])
    assert course.told == ["loss", "norm", "step 1"]
    observed = course.trainer
    del trainer
    with pytest.raises(ReferenceError):
        _ = observed.steps


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


def test_nothing_is_registered_for_what_nobody_wants_to_hear_and_nothing_stays(accel):
    class Steps(Observer):
        def step(self, steps):
            pass

    assert hooks(make(accel, []).model) == 0
    assert hooks(make(accel, [Steps()]).model) == 0
    trainer = make(accel, [Everything()])
    model = trainer.model
    assert hooks(model) == 5
    model[0].requires_grad_(False)
    trainer.refresh()
    trainer(data(1)[0])
    assert hooks(model) == 5
    del trainer
    assert hooks(model) == 0


def test_observers_change_no_number(accel):
    seen, unseen = make(accel, [Everything(), Everything()], flat=False), make(accel, [], flat=False)
    for batch in data(4):
        assert torch.equal(seen(batch), unseen(batch))
    assert all(map(torch.equal, seen.model.parameters(), unseen.model.parameters()))


@pytest.mark.parametrize("method", ["loss", "gradient_norm", "overflow", "learning_rate", "step"])
def test_an_observer_that_raises_in_the_three_calls_ends_one_of_them_after_it_is_whole(accel, method):
    class Broken(Observer):
        broken = True

    def raising(self, told):
        if self.broken:
            self.broken = False
            raise KeyError("planted")

    setattr(Broken, method, raising)
    trainer, right = make(accel, [Broken()], loss_scale="dynamic"), make(accel, [], loss_scale="dynamic")
    for number, batch in enumerate(data(4)):
        right(batch)
        loss = loss_of(trainer.forward, batch)
        if number == 0 and method == "loss":
            with pytest.raises(KeyError):
                trainer.backward(loss)
        else:
            trainer.backward(loss)
        if number == 0 and method != "loss":
            with pytest.raises(KeyError):
                trainer.update()
        else:
            trainer.update()
        assert trainer.steps == right.steps
    assert all(map(torch.equal, trainer.model.parameters(), right.model.parameters()))
    assert trainer.scaler.state_dict() == right.scaler.state_dict()


def test_what_is_no_observer_is_refused(accel):
    with pytest.raises(accelcore.ConfigurationError, match="not an observer"):
        make(accel, [print])

"""Two trainers that share a module, as in a GAN, against the same by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accelcore


def networks():
    torch.manual_seed(0)
    return nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))


def noise(steps):
    generator = torch.Generator().manual_seed(4)
    return [(torch.randn(4, 2, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(steps)]


def loss_of_critic(generator, critic, z, real):
    return critic(generator(z).detach()).mean() - critic(real).mean()


def loss_of_generator(generator, critic, z):
    return -critic(generator(z)).mean()


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("freezes", [False, True])
def test_neither_takes_the_others_gradients(accel, flat, name, freezes):
    """The generator's backward pass leaves gradients on the critic, unless it is frozen meanwhile."""
    generator, critic = networks()
    of_generator, of_critic = (accel.optimizers.create(name, m.parameters(), lr=0.1) for m in (generator, critic))
    train_critic = accel.trainer(
        critic, of_critic, loss=lambda m, b: loss_of_critic(generator, m, *b), flat=flat, loss_scale=128.0
    )
    train_generator = accel.trainer(
        generator, of_generator, loss=lambda m, b: loss_of_generator(m, critic, b), flat=flat
    )
    hand, judge = networks()
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    theirs, its = kind(hand.parameters(), lr=0.1), kind(judge.parameters(), lr=0.1)
    for z, real in noise(5):
        train_critic((z, real))
        critic.requires_grad_(not freezes)
        train_generator(z)
        critic.requires_grad_(True)

        judge.zero_grad()
        loss_of_critic(hand, judge, z, real).backward()
        its.step()
        hand.zero_grad()
        loss_of_generator(hand, judge, z).backward()
        theirs.step()
    for ours, expected in ((generator, hand), (critic, judge)):
        for mine, other in zip(ours.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("flat", [True, False])
def test_two_trainers_of_one_module_train_it_in_turns(accel, flat):
    """Each has an optimizer of its own over the same parameters, which each may lay into memory of its own."""
    torch.manual_seed(0)
    model, hand = nn.Linear(2, 1), nn.Linear(2, 1)
    hand.load_state_dict(model.state_dict())
    trainers = [
        accel.trainer(
            model, accel.optimizers.create("adamw", model.parameters(), lr=lr), loss=lambda m, x: m(x).square().mean(),
            flat=flat,
        )
        for lr in (0.1, 0.01)
    ]  # fmt: skip
    theirs = [torch.optim.AdamW(hand.parameters(), lr=lr) for lr in (0.1, 0.01)]
    for number, (x, _) in enumerate(noise(6)):
        trainers[number % 2](x)
        hand.zero_grad()
        hand(x).square().mean().backward()
        theirs[number % 2].step()
    torch.testing.assert_close(model.weight, hand.weight)


def test_a_window_that_reaches_no_parameter_is_refused_with_and_without_a_scale(accel):
    """torch's scaler refuses it, too: it counts as no clean step."""
    generator, critic = networks()
    for loss_scale in (None, "dynamic", 2.0):
        trainer = accel.trainer(
            critic, accel.optimizers.create("sgd", critic.parameters()), loss_scale=loss_scale,
            loss=lambda m, z: generator(z).sum(),
        )  # fmt: skip
        state = trainer.scaler.state_dict()
        with pytest.raises(accelcore.TrainingError, match=r"no parameter received a(.|\n)*must call the model"):
            trainer(noise(1)[0][0])
        assert trainer.steps == 0
        assert trainer.scaler.state_dict() == state


class ByHand:
    """Windows of gradients that are kept apart, as nobody else can add to them."""

    def __init__(self, optimizer, loss, accumulate):
        self.optimizer, self.loss, self.accumulate = optimizer, loss, accumulate
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.kept = []

    def __call__(self, batch):
        self.kept.append(torch.autograd.grad(self.loss(batch) / self.accumulate, self.parameters))
        if len(self.kept) == self.accumulate:
            for parameter, *gradients in zip(self.parameters, *self.kept, strict=True):
                parameter.grad = sum(gradients)
            self.optimizer.step()
            self.kept.clear()


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("saves", [True, False])
def test_windows_that_interleave_each_have_their_own_gradients(accel, flat, saves, tmp_path):
    """Each trainer has a window open while the other's backward pass runs through what it trains, or trains it, too."""
    generator, critic = networks()
    both = nn.ModuleList([generator, critic])  # the second trains the critic, too
    first = accel.trainer(
        critic, accel.optimizers.create("adamw", critic.parameters(), lr=0.1), accumulate=2, flat=flat,
    )  # fmt: skip
    second = accel.trainer(both, accel.optimizers.create("sgd", both.parameters(), lr=0.1), accumulate=3, flat=flat)
    hand, judge = networks()
    plain = (
        ByHand(torch.optim.AdamW(judge.parameters(), lr=0.1), lambda batch: loss_of_critic(hand, judge, *batch), 2),
        ByHand(
            torch.optim.SGD([*hand.parameters(), *judge.parameters()], lr=0.1),
            lambda batch: loss_of_generator(hand, judge, batch[0]), 3,
        ),
    )  # fmt: skip
    for batch in noise(12):
        first.backward(loss_of_critic(generator, critic, *batch))
        if saves:
            second.save(tmp_path)  # its gradients lie aside
        first.update()
        second.backward(loss_of_generator(generator, critic, batch[0]))
        second.update()
        for each in plain:
            each(batch)
    for ours, expected in ((generator, hand), (critic, judge)):
        for mine, other in zip(ours.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_a_window_that_fails_drops_no_gradients_of_another(accel):
    _, critic = networks()
    optimizer = accel.optimizers.create("sgd", critic.parameters(), lr=0.1)
    first = accel.trainer(critic, optimizer, loss=lambda m, b: m(b).sum(), accumulate=2)
    second = accel.trainer(
        critic, accel.optimizers.create("sgd", critic.parameters(), lr=0.1), loss=lambda m, b: 1 / 0, accumulate=2
    )
    hand = networks()[1]
    rows = torch.ones(2, 3)
    first(rows)
    with pytest.raises(ZeroDivisionError):
        second(rows)
    first(rows)
    hand(rows).sum().backward()
    torch.optim.SGD(hand.parameters(), lr=0.1).step()
    torch.testing.assert_close(critic[0].weight, hand[0].weight)

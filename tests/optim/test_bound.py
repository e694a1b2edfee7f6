"""An optimizer that a trainer has bound, flat or not, against torch's own class and the same gradients."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from thinned import diagonals, pairwise
from torch import nn

import accelcore

# Each optimizer under torch's own name, with options that leave no term of its formula out.
CASES = {
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5, "rho": 0.8, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    "adam": (torch.optim.Adam, {"lr": 0.1, "betas": (0.7, 0.8), "weight_decay": 0.1, "amsgrad": True, "eps": 1e-3}),
    "adamax": (torch.optim.Adamax, {"lr": 0.1, "weight_decay": 0.1, "eps": 1e-3}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "betas": (0.7, 0.8), "weight_decay": 0.1, "eps": 1e-3}),
    "asgd": (torch.optim.ASGD, {"lr": 0.1, "t0": 1.0, "weight_decay": 0.1}),
    "nadam": (torch.optim.NAdam, {"lr": 0.1, "weight_decay": 0.1, "eps": 1e-3}),
    "radam": (torch.optim.RAdam, {"lr": 0.1, "weight_decay": 0.1, "eps": 1e-3}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True, "eps": 1e-3}),
    "rprop": (torch.optim.Rprop, {"lr": 0.1, "etas": (0.6, 1.1)}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5, "nesterov": True, "weight_decay": 0.1}),
}
FUSED = {"adagrad", "adam", "adamw", "sgd"}
ROUTED = [
    (name, route) for name in CASES for route in ("fused", "loop", "foreach") if route != "fused" or name in FUSED
]
EACH_ROUTE = pytest.mark.parametrize(("routed", "flat"), diagonals(ROUTED, [True, False]))
FLAT = pytest.mark.parametrize("flat", [True, False], ids=["flat", "per tensor"])


class Model(nn.Module):
    """Tied weights, a frozen parameter, one that is used late, one never, and one laid out channels_last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.other.weight = self.one.weight
        self.frozen, self.late, self.never = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)
        self.image, self.image_2 = nn.Conv2d(2, 3, 2), nn.Conv2d(2, 3, 2)
        self.image.to(memory_format=torch.channels_last)

    def forward(self, x, late):
        x = self.frozen(torch.tanh(self.other(torch.tanh(self.one(x)))))
        image = torch.stack([x, x * 2, x.cos(), x.exp()], 1)[..., :2].reshape(-1, 2, 2, 2)
        x = x + (self.image(image) * self.image_2(image)).flatten(1)
        return (x.square().mean() + self.late(x).square().mean()) if late else x.square().mean()


def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 3, generator=generator), number >= 2) for number in range(count)]


def groups(model, options):
    """Two groups, of which one has options of its own."""
    rest = [parameter for name, parameter in model.named_parameters() if not name.startswith("one")]
    return [{"params": list(model.one.parameters())}, {"params": rest, "lr": options["lr"] / 2}]


def oracle(name, model):
    kind, options = CASES[name]
    return kind(groups(model, options), foreach=False, **options)


def by_hand(model, optimizer, feed):
    for batch in feed:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()


def make(accel, name, route, model, **options):
    optimizer = accel.optimizers.create(name, groups(model, CASES[name][1]), route=route, **CASES[name][1])
    return optimizer, accel.trainer(model, optimizer, **options)


def train(trainer, feed):
    for batch in feed:
        trainer(batch)


def same(model, other, *, rtol=1e-5, atol=1e-5):
    for (name, one), (_, its) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(one, its, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def same_state(model, optimizer, other, theirs):
    for one, its in zip(model.parameters(), other.parameters(), strict=True):
        mine = optimizer.state[one]
        for key, value in theirs.state[its].items():
            if key == "momentum_buffer" and value is None:
                continue
            torch.testing.assert_close(
                torch.as_tensor(mine[key]).float(), torch.as_tensor(value).float(), rtol=1e-5, atol=1e-5
            )
        assert its in theirs.state or not mine


@EACH_ROUTE
def test_tied_frozen_late_and_unused_parameters_are_trained_as_by_torch(accel, routed, flat):
    (name, route), model, other = routed, Model(), Model()
    optimizer, trainer = make(accel, name, route, model, flat=flat)
    theirs = oracle(name, other)
    train(trainer, batches(5))
    by_hand(other, theirs, batches(5))
    same(model, other)
    same_state(model, optimizer, other, theirs)
    assert optimizer.route == route
    assert model.other.weight is model.one.weight
    assert torch.equal(model.never.weight, Model().never.weight)


@EACH_ROUTE
def test_a_state_moves_to_torch_and_back_in_mid_training(accel, routed, flat):
    """Ours, then torch's class from our state, then ours from its state, then ours from ours."""
    (name, route), model, other = routed, Model(), Model()
    theirs = oracle(name, other)
    by_hand(other, theirs, batches(9))

    feed = batches(9)
    optimizer, trainer = make(accel, name, route, model, flat=flat)
    train(trainer, feed[:3])
    between = oracle(name, model)
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)  # a pickle, as users keep it
    saved.seek(0)
    between.load_state_dict(torch.load(saved))
    by_hand(model, between, feed[3:5])
    optimizer.load_state_dict(between.state_dict())  # bound, with steps behind it
    train(trainer, feed[5:7])
    fresh, trainer = make(accel, name, route, model, flat=flat)
    fresh.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    train(trainer, feed[7:])
    same(model, other, rtol=1e-4, atol=1e-4)
    same_state(model, fresh, other, theirs)


@pytest.mark.parametrize(("routed", "flat", "steps"), pairwise(ROUTED, [True, False], [0, 3]))
def test_a_group_is_added_before_and_after_the_first_steps(accel, routed, flat, steps):
    (name, route), model, other = routed, Model(), Model()
    kind, options = CASES[name]
    for each in (model, other):
        each.requires_grad_(False).one.requires_grad_(True)
    optimizer = accel.optimizers.create(name, model.one.parameters(), route=route, **options)
    trainer = accel.trainer(model, optimizer, flat=flat)
    added, its = ([*each.late.parameters(), each.image.weight] for each in (model, other))
    # From the start, without gradients until then: Adagrad of torch before 2.13 fails with a group that comes later.
    groups = [{"params": list(other.one.parameters())}, {"params": its, "lr": 0.05}]
    theirs = kind(groups, foreach=False, **options)
    feed = batches(7)
    train(trainer, feed[:steps])
    by_hand(other, theirs, feed[:steps])
    for parameter in (*added, *its):
        parameter.requires_grad_(True)
    optimizer.add_param_group({"params": added, "lr": 0.05})
    trainer.refresh()
    train(trainer, feed[steps:])
    by_hand(other, theirs, feed[steps:])
    same(model, other)
    same_state(model, optimizer, other, theirs)


@FLAT
@pytest.mark.parametrize("name", ["adamw", "sgd", "rmsprop"])
def test_options_changed_between_steps_hold_from_the_next_step_on(accel, name, flat):
    model, other = Model(), Model()
    optimizer, trainer = make(accel, name, "auto", model, flat=flat)
    theirs = oracle(name, other)
    feed = batches(6)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.7) for each in (optimizer, theirs)]
    for number, batch in enumerate(feed):
        trainer(batch)
        by_hand(other, theirs, [batch])
        for each in (optimizer, theirs):
            each.param_groups[0]["weight_decay"] = 0.1 * number
            if number == 3:
                each.param_groups[1]["maximize"] = True
        for schedule in schedules:
            schedule.step()
    same(model, other)


@FLAT
@pytest.mark.parametrize("change", ["strides", "data", "assign", "load_state_dict", "dtype"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_memory_that_is_replaced_after_a_trainer_was_made_is_followed_or_refused(accel, name, flat, change):
    model, other = Model(), Model()
    _, trainer = make(accel, name, "auto", model, flat=flat)
    theirs = oracle(name, other)
    feed = batches(5)
    train(trainer, feed[:2])
    by_hand(other, theirs, feed[:2])
    if change == "strides":
        model.to(memory_format=torch.channels_last)
        trainer.refresh()
    elif change == "data":
        with torch.no_grad():
            model.one.bias.data = torch.full((3,), 0.5)
            other.one.bias.fill_(0.5)
    elif change == "assign":
        model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    elif change == "load_state_dict":
        with torch.no_grad():
            other.image.weight.mul_(2)
        model.load_state_dict(other.state_dict())
    else:
        model.double()
    rest = [(x.to(model.one.weight.dtype), late) for x, late in feed[2:]]
    if change in ("assign", "dtype"):
        with pytest.raises((accelcore.TrainingError, RuntimeError), match=r"changed|was cast|received a gradient"):
            train(trainer, rest)
        return
    train(trainer, rest)
    by_hand(other, theirs, feed[2:])
    same(model, other)


@FLAT
def test_step_hooks_run_in_order_around_the_update(accel, flat):
    model = Model()
    optimizer, trainer = make(accel, "adamw", "auto", model, flat=flat)
    seen, first = [], model.one.weight.detach().clone()

    def note(what):
        def hook(*given):
            assert given[0] is optimizer
            seen.append((what, torch.equal(model.one.weight, first)))

        return hook

    optimizer.register_step_pre_hook(note("before"))
    handle = optimizer.register_step_post_hook(note("after"))
    train(trainer, batches(1))
    handle.remove()
    first = model.one.weight.detach().clone()
    train(trainer, batches(1))
    assert seen == [("before", True), ("after", False), ("before", True)]


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("policy", ["fp32", accelcore.Policy(model_dtype="bfloat16")])
def test_a_weight_that_is_transposed_in_its_memory_is_refused_until_a_refresh(accel, flat, policy):
    """It keeps its address: masters would undo the change, and kernels would walk it in another order."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=0.01)
    trainer = accel.trainer(
        model, optimizer, loss=lambda m, b: m(b.to(m.weight.dtype)).square().sum(), flat=flat, precision=policy
    )
    trainer(torch.randn(3, 4))
    turned = model.weight.detach().t().clone()
    model.weight.data = model.weight.data.t()
    with pytest.raises(accelcore.TrainingError, match="another memory layout"):
        trainer(torch.randn(3, 4))
    trainer.refresh()
    trainer(torch.randn(3, 4))
    assert (model.weight - turned).abs().max() < 0.03, "the weight that was turned is trained"


@pytest.mark.parametrize("rows", [1, 2])
def test_a_weight_that_shrinks_in_its_memory_is_refused_in_flat_memory(accel, rows):
    model = nn.Linear(4, 4, bias=False)
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=0.1, route="loop")
    trainer = accel.trainer(model, optimizer, loss=lambda m, b: m(b).square().sum(), flat=True)
    trainer(torch.ones(3, 4))
    model.weight.data = model.weight.data[:rows]
    with pytest.raises(accelcore.TrainingError, match=rf"\({rows}, 4\) .*\(4, 4\)"):
        trainer(torch.ones(3, 4))


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb"])
@pytest.mark.parametrize("flat", [True, False])
def test_autograd_notices_an_update(accel, name, flat):
    model, rows = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), torch.ones(2, 3)
    optimizer = accel.optimizers.create(name, model.parameters(), lr=0.1)
    trainer = accel.trainer(model, optimizer, loss=lambda model, rows: model(rows).square().sum(), flat=flat)
    kept = model(rows).square().sum()
    trainer(rows)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adagrad"])
def test_autograd_notices_an_update_by_torchs_fused_kernels(accel, name):
    weight = nn.Parameter(torch.ones(3))
    optimizer = accel.optimizers.create(name, [weight], lr=0.1, route="fused")
    kept = weight.square().sum()
    kept.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()

"""State goes from route to route, flat and not, to torch and back, and from other libraries' layouts to ours."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import accelcore
from accelcore.optim.formulas import FORMULAS
from accelcore.testing.support.options import LR, NINE, ORACLES, oracle, taken_by

EACH = pytest.mark.parametrize("name", NINE)
IN_TORCH = {
    "adadelta": torch.optim.Adadelta,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}


def options_of(name):
    momentum = {"momentum": 0.7} if name in ("sgd", "rmsprop") else {}
    return {"lr": LR, **ORACLES[name][1][-1], **momentum}


class Net(nn.Module):
    """Parameters of each kind: a matrix, a vector, a scalar, one laid out channels_last, some used now and then."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.one, self.image, self.rare = nn.Linear(4, 8), nn.Conv2d(2, 3, 2), nn.Linear(3, 3)
        self.image.to(memory_format=torch.channels_last)
        self.size = nn.Parameter(torch.tensor(0.5))

    def forward(self, batch):
        rows, rare = batch
        seen = self.image(torch.tanh(self.one(rows)).view(-1, 2, 2, 2)).flatten(1)
        seen = seen * self.size
        return ((self.rare(seen) if rare else seen) - 1).square().mean()


def batches(count):
    generator = torch.Generator().manual_seed(4)
    return [(torch.randn(6, 4, generator=generator), number % 3 == 1) for number in range(count)]


def by_hand(model, optimizer, feed):
    for rows, rare in feed:
        optimizer.zero_grad()
        model((rows.to(model.size.dtype), rare)).backward()
        optimizer.step()


def make(accel, name, model, route):
    return accel.optimizers.create(name, model.parameters(), route=route, **options_of(name))


def train(accel, name, model, saved, feed, *, route, flat):
    """Some steps by a route, from a saved state: in a loop of one's own, or by a trainer, flat or not."""
    optimizer = make(accel, name, model, route)
    if flat is None:
        if saved is not None:
            optimizer.load_state_dict(saved)
        by_hand(model, optimizer, feed)
    else:
        trainer = accel.trainer(model, optimizer, loss=lambda model, batch: model(batch), flat=flat)
        if saved is not None:
            optimizer.load_state_dict(saved)
        for batch in feed:
            trainer(batch)
        assert optimizer.route == route
    return optimizer


def same(model, other, rtol=1e-5, atol=2e-5):
    for one, its in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), its.detach().to(one.dtype), rtol=rtol, atol=atol)


@EACH
def test_a_run_that_changes_route_and_memory_after_each_step_or_two_goes_as_one(accel, name):
    routes = [choice.route for choice in accel.optimizers.explain(name, **options_of(name))]
    stations = [(route, flat) for flat in (None, True, False) for route in (*routes, routes[0])]
    model, other, feed = Net(), Net().double(), batches(2 * len(stations))
    reference = oracle(name, other.parameters(), **options_of(name))
    saved = None
    for number, (route, flat) in enumerate(stations):
        now = feed[2 * number : 2 * number + 2]
        optimizer = train(accel, name, model, saved, now, route=route, flat=flat)
        saved = copy.deepcopy(optimizer.state_dict())
        by_hand(other, reference, now)
        same(model, other)
        fresh = Net()  # in memory of its own
        fresh.load_state_dict(model.state_dict())
        model = fresh
    assert saved["state"].keys() == reference.state_dict()["state"].keys()
    for parameter, entry in zip(other.parameters(), saved["state"].values(), strict=True):
        assert all(value.shape == parameter.shape for key, value in entry.items() if key != "step")
        assert entry.keys() == reference.state[parameter].keys()


@pytest.mark.parametrize("step", [2, 2.0, torch.tensor(2), torch.tensor(2.0, dtype=torch.float64)], ids=repr)
@pytest.mark.parametrize("flat", [None, True, False])
def test_steps_are_counted_in_fp32_whatever_a_state_counts_in(accel, step, flat):
    feed = [(rows, True) for rows, _ in batches(4)]
    other = Net()
    by_hand(other, torch.optim.AdamW(other.parameters(), foreach=False, **options_of("adamw")), feed)
    for choice in accel.optimizers.explain("adamw", **options_of("adamw")):
        model = Net()
        saved = train(accel, "adamw", model, None, feed[:2], route=choice.route, flat=flat).state_dict()
        for entry in saved["state"].values():
            entry["step"] = copy.copy(step)
        again = train(accel, "adamw", model, saved, feed[2:], route=choice.route, flat=flat)
        same(model, other)
        assert {entry["step"].dtype for entry in again.state_dict()["state"].values()} == {torch.float32}


@pytest.mark.parametrize("name", IN_TORCH)
@pytest.mark.parametrize("route", ["auto", "formula"])
def test_what_torch_has_too_goes_on_by_torchs_own_class(accel, name, route):
    model, other, feed = Net(), Net(), batches(6)
    optimizer = make(accel, name, model, route)
    by_hand(model, optimizer, feed[:3])
    theirs = IN_TORCH[name](model.parameters(), **options_of(name))
    theirs.load_state_dict(optimizer.state_dict())
    by_hand(model, theirs, feed[3:])
    reference = IN_TORCH[name](other.parameters(), foreach=False, **options_of(name))
    by_hand(other, reference, feed)
    same(model, other)


def as_torch_npu(state):
    """torch_npu, and Ascend's apex: the same keys, steps as a Python int."""
    for entry in state["state"].values():
        if "step" in entry:
            entry["step"] = int(entry["step"])


def as_nvidia_apex(state):
    """NVIDIA's apex counts the steps of a group in the group."""
    for group in state["param_groups"]:
        steps = {int(state["state"][number].pop("step")) for number in group["params"]}
        (group["step"],) = steps


@EACH
@pytest.mark.parametrize("flat", [None, True, False], ids=["own loop", "flat", "by tensor"])
def test_a_state_of_torch_npu_is_gone_on_from(accel, name, flat):
    model, other, feed = Net(), Net(), batches(6)
    reference = oracle(name, other.parameters(), **options_of(name))
    by_hand(other, reference, feed[:3])
    saved = copy.deepcopy(reference.state_dict())
    as_torch_npu(saved)
    by_hand(other, reference, feed[3:])
    by_hand(model, oracle(name, model.parameters(), **options_of(name)), feed[:3])
    for route in [choice.route for choice in accel.optimizers.explain(name, **options_of(name))]:
        model_of_route = copy.deepcopy(model)
        optimizer = train(accel, name, model_of_route, saved, feed[3:], route=route, flat=flat)
        same(model_of_route, other)
        for parameter, entry in optimizer.state_dict()["state"].items():
            assert "step" not in entry or entry["step"].dtype == torch.float32, parameter


@pytest.mark.parametrize("name", ["adam", "adamw", "lamb"])
def test_steps_that_are_counted_in_the_group_are_taken_over(accel, name):
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(model.state_dict())
    reference = oracle(name, other.parameters(), **options_of(name))

    def step(model, optimizer, number):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + number)
        optimizer.step()

    for number in range(2):
        step(other, reference, number)
    saved = copy.deepcopy(reference.state_dict())
    as_nvidia_apex(saved)
    optimizer = accel.optimizers.create(name, model.parameters(), **options_of(name))
    model.load_state_dict(other.state_dict())
    optimizer.load_state_dict(saved)
    assert "step" not in optimizer.param_groups[0]
    for number in range(2, 5):
        step(other, reference, number)
        step(model, optimizer, number)
    same(model, other)


def test_a_bertadam_that_did_not_count_is_taken_over_with_a_word(accel, caplog):
    model = nn.Linear(3, 2)
    reference = oracle("bertadam", model.parameters(), lr=LR)
    model(torch.ones(1, 3)).sum().backward()
    reference.step()
    saved = copy.deepcopy(reference.state_dict())
    optimizer = accel.optimizers.create("bertadam", model.parameters(), lr=LR, t_total=10)
    for step, words in ((1, 0), (0, 1)):
        for entry in saved["state"].values():
            entry["step"] = step
        with caplog.at_level(logging.WARNING, logger="accelcore"):
            optimizer.load_state_dict(saved)
        assert len(caplog.records) == words
    assert "a schedule starts over" in caplog.text


@EACH
@pytest.mark.parametrize("flat", [None, True, False], ids=["own loop", "flat", "by tensor"])
@pytest.mark.parametrize("masters", [True, False], ids=["masters", "no masters"])
def test_moments_of_a_bf16_model_are_float32_wherever_they_come_from(accel, name, flat, masters):
    saved = None
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    precision = accelcore.Policy(model_dtype="bfloat16", masters=masters)
    for again in range(3):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).bfloat16()
        optimizer = accel.optimizers.create(name, model.parameters(), **options_of(name))
        if again == 1:
            optimizer.load_state_dict(saved)
        if flat is not None:
            trainer = accel.trainer(
                model, optimizer, loss=lambda model, batch: model(batch).square().mean(), precision=precision, flat=flat
            )
        if again == 2:
            optimizer.load_state_dict(saved)
        for _ in range(2):
            if flat is not None:
                trainer(x)
            else:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        state = optimizer.state_dict()
        assert {value.dtype for entry in state["state"].values() for value in entry.values()} == {torch.float32}
        if saved is not None and "exp_avg" in state["state"][0]:
            assert not torch.equal(state["state"][0]["exp_avg"], state["state"][0]["exp_avg"].bfloat16().float())
        saved = copy.deepcopy(state)


@EACH
@pytest.mark.parametrize("flat", [None, True], ids=["own loop", "flat"])
def test_a_state_kept_in_bfloat16_is_bfloat16_and_learns(accel, name, flat):
    model, other, feed = Net(), Net(), batches(4)
    options = {**options_of(name), "state_dtype": "bfloat16"}
    optimizer = accel.optimizers.create(name, model.parameters(), **options)
    if flat is None:
        by_hand(model, optimizer, feed)
    else:
        trainer = accel.trainer(model, optimizer, loss=lambda model, batch: model(batch), flat=flat)
        for batch in feed:
            trainer(batch)
    by_hand(other, oracle(name, other.parameters(), **options_of(name)), feed)
    same(model, other, rtol=0.1, atol=0.05)
    assert not all(torch.equal(one, its) for one, its in zip(model.parameters(), other.parameters(), strict=True))
    kept = {(key, value.dtype) for entry in optimizer.state_dict()["state"].values() for key, value in entry.items()}
    assert {dtype for key, dtype in kept if key != "step"} == {torch.bfloat16}
    assert {dtype for key, dtype in kept if key == "step"} <= {torch.float32}
    # The option is the script's: what a state was kept in elsewhere does not change it.
    exact = accel.optimizers.create(name, model.parameters(), **options_of(name))
    exact.load_state_dict(optimizer.state_dict())
    by_hand(model, exact, feed[:1])
    assert {value.dtype for entry in exact.state_dict()["state"].values() for value in entry.values()} == {
        torch.float32
    }


@EACH
def test_low_precision_is_left_to_torch_where_that_is_asked_for(accel, name):
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    explained = accel.optimizers.create(name, [parameter], lr=LR)
    assert explained.route not in ("fused", "loop", "foreach")
    if name not in IN_TORCH:
        return
    for asked in ({"route": "loop"}, {"route": "loop", "state_dtype": "bfloat16"}, {"state_dtype": "bfloat16"}):
        optimizer = accel.optimizers.create(name, [parameter], lr=LR, **asked)
        assert optimizer.route == asked.get("route", optimizer.route)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert {v.dtype for k, v in optimizer.state[parameter].items() if k != "step"} <= {torch.bfloat16}
    with pytest.raises(accelcore.UnsupportedError, match="keeps the state of bfloat16 parameters in that precision"):
        accel.optimizers.create(name, [parameter], lr=LR, route="loop", state_dtype="float32")


@EACH
def test_a_state_of_another_shape_is_refused_and_changes_nothing(accel, name):
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = accel.optimizers.create(name, [parameter], **options_of(name))
    parameter.grad = torch.ones(3, 2)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    spoiled = copy.deepcopy(before)
    key = next(key for key in spoiled["state"][0] if key != "step")
    spoiled["state"][0][key] = torch.zeros(1)
    with pytest.raises(ValueError, match="has shape"):
        optimizer.load_state_dict(spoiled)
    for key, value in optimizer.state_dict()["state"][0].items():
        assert torch.equal(value, before["state"][0][key])


def test_every_option_of_the_four_is_one_of_the_oracle_s():
    """The oracles stand for the packages; see test_published.py."""
    for name in set(NINE) - set(IN_TORCH):
        defaults = FORMULAS[name]([nn.Parameter(torch.ones(1))], lr=LR).defaults
        assert set(defaults) == taken_by(ORACLES[name][0])
        assert {**defaults, "lr": None} == {**ORACLES[name][0].options, "lr": None}

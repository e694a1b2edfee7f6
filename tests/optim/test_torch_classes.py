"""Every class of torch.optim by its name, also those that do not treat each element alike, or need a closure."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import accelcore
from accelcore.errors import ConfigurationError, TrainingError, UnsupportedError

CLASSES = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
MUON = "muon" in CLASSES  # older torch lacks it
WHOLE = {"adafactor": {"lr": 0.05}, **({"muon": {"lr": 0.05, "momentum": 0.8}} if MUON else {})}
"""Those that look at a tensor as a whole, with options."""


def net():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 2, bias=False))


def loss_of(model, batch):
    return (model(batch) - 1).square().mean()


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 4, generator=generator) for _ in range(count)]


def by_hand(model, optimizer, feed):
    for batch in feed:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def same(model, other):
    for one, its in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, its, rtol=1e-5, atol=1e-5)


def test_every_class_of_torch_has_its_name(accel):
    assert set(CLASSES) <= set(accel.optimizers.names())
    assert {"adafactor", "lbfgs", "sparseadam"} <= set(CLASSES)
    for name, kind in CLASSES.items():
        params = [nn.Parameter(torch.ones(2, 2))]
        routes = [choice.route for choice in accel.optimizers.explain(name)]
        assert type(accel.optimizers.create(name, params, route="loop").implementation) is kind
        assert "foreach" not in routes or accel.optimizers.create(name, params, route="foreach").route == "foreach"


@pytest.mark.parametrize("flat", [None, True, False], ids=["own loop", "flat", "by tensor"])
@pytest.mark.parametrize("name", WHOLE)
def test_what_looks_at_whole_tensors_goes_as_torchs_own_also_from_a_saved_state(accel, name, flat):
    """`flat=True` lays parameters flat; such an optimizer is still given each in its shape."""
    model, other, feed = net(), net(), batches(6)
    theirs = CLASSES[name](other.parameters(), **WHOLE[name])
    by_hand(other, theirs, feed)
    saved = None
    for now in (feed[:3], feed[3:]):
        optimizer = accel.optimizers.create(name, model.parameters(), **WHOLE[name])
        trainer = None if flat is None else accel.trainer(model, optimizer, loss=loss_of, flat=flat)
        if saved is not None:
            optimizer.load_state_dict(saved)
        if trainer is None:
            by_hand(model, optimizer, now)
        else:
            for batch in now:
                trainer(batch)
        saved = copy.deepcopy(optimizer.state_dict())
    same(model, other)
    back = CLASSES[name](other.parameters(), **WHOLE[name])
    back.load_state_dict(saved)
    assert back.state_dict()["state"].keys() == theirs.state_dict()["state"].keys()


@pytest.mark.skipif(not MUON, reason="this torch has no Muon")
def test_muon_refuses_what_is_no_matrix_as_torch_does(accel):
    with pytest.raises(ConfigurationError, match="2D"):
        accel.optimizers.create("muon", [nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize("trained", [True, False], ids=["trainer", "own loop"])
def test_sparseadam_updates_the_rows_that_were_used(accel, trained):
    def embedding():
        torch.manual_seed(0)
        return nn.Embedding(6, 3, sparse=True)

    model, other = embedding(), embedding()
    optimizer = accel.optimizers.create("sparseadam", model.parameters(), lr=0.1)
    theirs = torch.optim.SparseAdam(other.parameters(), lr=0.1)
    trainer = accel.trainer(model, optimizer, loss=lambda m, b: m(b).square().mean()) if trained else None
    for tokens in (torch.tensor([0, 2, 2]), torch.tensor([5]), torch.tensor([2, 5])):
        for each, its in ((other, theirs),) if trainer else ((other, theirs), (model, optimizer)):
            its.zero_grad()
            each(tokens).square().mean().backward()
            its.step()
        if trainer:
            trainer(tokens)
    same(model, other)
    assert torch.equal(model.weight[1], embedding().weight[1])


def closure_of(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("options", [{}, {"line_search_fn": "strong_wolfe", "lr": 0.5, "max_iter": 4}], ids=str)
def test_lbfgs_is_stepped_by_a_closure_and_its_state_goes_either_way(accel, options):
    model, other, (batch,) = net(), net(), batches(1)
    optimizer = accel.optimizers.create("lbfgs", model.parameters(), **options)
    theirs = torch.optim.LBFGS(other.parameters(), **options)
    for _ in range(2):
        with torch.no_grad():
            found = optimizer.step(closure_of(model, optimizer, batch))
        torch.testing.assert_close(found, theirs.step(closure_of(other, theirs, batch)))
    same(model, other)
    crossed = accel.optimizers.create("lbfgs", model.parameters(), **options)
    crossed.load_state_dict(theirs.state_dict())
    back = torch.optim.LBFGS(other.parameters(), **options)
    back.load_state_dict(optimizer.state_dict())
    crossed.step(closure_of(model, crossed, batch))
    back.step(closure_of(other, back, batch))
    same(model, other)


def test_lbfgs_without_a_closure_says_what_it_needs(accel):
    optimizer = accel.optimizers.create("lbfgs", net().parameters())
    with pytest.raises(TrainingError, match=r"step\(closure\)"):
        optimizer.step()


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torch's"])
def test_a_trainer_refuses_what_needs_a_closure_when_it_is_made(accel, ours):
    model = net()
    optimizer = accel.optimizers.create("lbfgs", model.parameters()) if ours else torch.optim.LBFGS(model.parameters())
    with pytest.raises(UnsupportedError, match="closure"):
        accel.trainer(model, optimizer, loss=loss_of)
    same(model, net())


@pytest.mark.parametrize("name", ["nadam", "adagrad", *(["muon"] if MUON else [])])
def test_state_dtype_is_refused_where_no_route_keeps_state_so(accel, name):
    parameter = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(UnsupportedError, match="not in bfloat16"):
        accel.optimizers.create(name, [parameter], state_dtype="bfloat16")
    assert accel.optimizers.create(name, [parameter], state_dtype="float32").implementation.state_dict()


@pytest.mark.parametrize("name", CLASSES)
def test_a_learning_rate_that_is_none_is_refused_in_every_group(accel, name):
    for lr in (-1.0, float("nan")):
        with pytest.raises(ConfigurationError, match=r"lr|learning rate"):
            accel.optimizers.create(name, [{"params": [nn.Parameter(torch.ones(2, 2))], "lr": lr}])


def test_an_optimizer_that_treats_no_element_alone_is_laid_flat_by_parameter(accel):
    """Lamb's ratio is each tensor's own: taken over all of them as one, it would be another optimizer."""
    found = []
    for flat in (True, False):
        model = net()
        optimizer = accel.optimizers.create("lamb", model.parameters(), lr=0.1, route="formula")
        trainer = accel.trainer(model, optimizer, loss=loss_of, flat=flat)
        for batch in batches(3):
            trainer(batch)
        found.append(model)
    same(*found)
    assert accelcore.select("cpu").optimizers.explain("lamb")[-1].route == "formula"


@pytest.mark.parametrize(
    "name", ["adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd"]
)
def test_an_optimizer_that_treats_each_element_alike_takes_shards(accel, name):
    optimizer = accel.optimizers.create(name, [torch.ones(3, requires_grad=True)], lr=0.1)
    assert optimizer.route_for({torch.float32}, flat=False, sharded=True).memory == "any"

"""Memory that runs out inside an optimizer's first step: nothing of what it had begun is in the way of the next."""

from __future__ import annotations

from copy import deepcopy
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

OWN = [
    (name, route)
    for name in ("adamw", "adagrad", "rmsprop", "nadam", "sgd", "lamb")
    for route in ("auto", "fused", "foreach", "loop", "formula")
    if (name, route) not in {("rmsprop", "fused"), ("nadam", "fused"), ("nadam", "formula"), ("lamb", "fused")}
    and not (name == "lamb" and route in ("foreach", "loop"))
    and not (name == "adagrad" and route == "formula")
]
GIVEN = [
    (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.RMSprop, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
]


class RunsOut:
    """Raises at the call of torch.zeros_like that is the `last`."""

    def __init__(self, last):
        self.left, self.zeros_like = last, torch.zeros_like

    def __call__(self, *args, **options):
        self.left -= 1
        if not self.left:
            raise torch.OutOfMemoryError("planted")
        return self.zeros_like(*args, **options)


def _loss(model, batch):
    return mse_loss(model(batch[0]), batch[1])


def _check(accel, make, **options):
    """Have memory run out at each of the first allocations; what is trained afterwards is as if it had not."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    batches = [(torch.randn(6, 5), torch.randn(6, 2)) for _ in range(3)]

    def trained(last):
        model = deepcopy(start)
        trainer = accel.trainer(model, make(model), loss=_loss, **options)
        raised = False
        if last:
            with patch.object(torch, "zeros_like", RunsOut(last)):
                try:
                    trainer(batches[0])
                except torch.OutOfMemoryError:
                    raised = True
                else:
                    return None
        for batch in batches:
            trainer(batch)
        assert trainer.steps == len(batches)
        assert raised == bool(last)
        return list(model.parameters())

    expected = trained(0)
    for last in range(1, 10):
        found = trained(last)
        if found is None:
            return last - 1
        torch.testing.assert_close(found, expected)
    return last


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("name", "route"), OWN)
def test_an_optimizer_of_accelcore_begins_anew(accel, name, route, flat):
    def make(model):
        return accel.optimizers.create(name, model.parameters(), lr=1e-2, route=route)

    _check(accel, make, flat=flat)


@pytest.mark.parametrize(("kind", "options"), GIVEN, ids=str)
def test_an_optimizer_of_torchs_begins_anew(accel, kind, options):
    times = _check(accel, lambda model: kind(model.parameters(), lr=1e-2, **options))
    assert times or kind in (torch.optim.Adagrad, torch.optim.SGD)


@pytest.mark.parametrize("given", [True, False])
def test_a_kernel_that_raises_leaves_the_number_of_steps(accel, given):
    def make(model):
        if given:
            return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        return accel.optimizers.create("adamw", model.parameters(), lr=1e-2, route="fused")

    torch.manual_seed(0)
    models, batch = [nn.Linear(5, 2)], (torch.randn(6, 5), torch.randn(6, 2))
    models.append(deepcopy(models[0]))
    trainers = [accel.trainer(model, make(model), loss=_loss, flat=None if given else False) for model in models]
    trainers[0](batch)
    with (
        patch.object(torch, "_fused_adamw_", side_effect=torch.OutOfMemoryError("planted")),
        pytest.raises(torch.OutOfMemoryError),
    ):
        trainers[0](batch)
    trainers[0](batch)
    trainers[1](batch)
    trainers[1](batch)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_a_class_that_keeps_its_state_in_its_own_way_shows_its_own_error(accel):
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.state["rounds"] = [1]
            raise torch.OutOfMemoryError("planted")

    model = nn.Linear(5, 2)
    trainer = accel.trainer(model, Counting(model.parameters()), loss=_loss)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        trainer((torch.randn(6, 5), torch.randn(6, 2)))
    assert trainer.optimizer.state["rounds"] == [1]

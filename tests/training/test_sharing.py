"""What is not one trainer's alone: an optimizer, a step by hand, an update that was never trained for."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

import accelcore
from accelcore import Policy


def loss_of(model, rows):
    return model(rows).square().mean()


@pytest.mark.parametrize("flat", [True, False])
def test_an_optimizer_that_another_trainer_has_bound_is_refused(accel, flat):
    model = nn.Linear(4, 2)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    first = accel.trainer(model, optimizer, loss=loss_of, flat=flat)
    second = accel.trainer(model, optimizer, loss=loss_of, flat=flat)
    before = model.weight.detach().clone()
    with pytest.raises(accelcore.TrainingError, match="another trainer has bound this optimizer"):
        first(torch.ones(3, 4))
    assert torch.equal(model.weight, before)
    second(torch.ones(3, 4))
    assert not torch.equal(model.weight, before)


def test_a_step_by_hand_with_a_bound_optimizer_uses_no_old_gradient(accel):
    model = nn.Linear(4, 2)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    trainer = accel.trainer(model, optimizer, loss=loss_of, flat=True)
    trainer(torch.ones(3, 4))
    before = model.weight.detach().clone()
    loss_of(model, torch.ones(3, 4)).backward()
    with pytest.raises(accelcore.TrainingError, match=r"trainer\.update"):
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_sparse_gradients_of_masters_move_their_rows_and_no_others(accel):
    found = []
    for precision in ("fp32", Policy(model_dtype="bfloat16")):
        torch.manual_seed(0)
        table = nn.Embedding(6, 2, sparse=True)
        optimizer = accel.optimizers.create("sgd", table.parameters(), lr=0.5, route="loop")
        trainer = accel.trainer(table, optimizer, loss=lambda m, tokens: m(tokens).sum(), precision=precision)
        before = table.weight.detach().float().clone()
        trainer(torch.tensor([2]))
        trainer(torch.tensor([1, 4, 4]))
        found.append(table.weight.detach().float() - before)
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=0.02)
    assert not found[1][[0, 3, 5]].any()


def test_a_weight_that_is_not_finite_spoils_its_own_window_only(accel):
    model = nn.Linear(4, 2)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    weights = iter([torch.tensor(float("nan")), torch.tensor(3.0)])
    trainer = accel.trainer(
        model, optimizer, loss=loss_of, loss_scale="dynamic", weight=lambda batch: next(weights)
    )  # fmt: skip
    trainer(torch.ones(3, 4))
    before = model.weight.detach().clone()
    trainer(torch.ones(3, 4))
    assert trainer.skipped == 1
    assert bool(model.weight.isfinite().all())
    assert not torch.equal(model.weight, before)


def test_the_state_of_an_optimizer_is_a_view_that_is_not_set(accel):
    optimizer = accel.optimizers.create("adamw", nn.Linear(4, 2).parameters())
    with pytest.raises(accelcore.TrainingError, match="load_state_dict"):
        optimizer.state = {}


def test_a_load_hook_that_raises_ends_the_trainer(accel, tmp_path):
    def make():
        model = nn.Linear(4, 2)
        optimizer = accel.optimizers.create("adamw", model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return accel.trainer(model, optimizer, loss=loss_of, scheduler=scheduler)

    saved = make()
    for _ in range(3):
        saved(torch.ones(3, 4))
    saved.save(tmp_path)
    trainer = make()
    before = trainer.model.weight.detach().clone()

    def refuse(*_):
        raise ValueError("not this one")

    handle = trainer.model.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(accelcore.CheckpointError, match="not this one"):
        trainer.resume(tmp_path)
    handle.remove()
    with pytest.raises(accelcore.TrainingError, match="restored in part"):
        trainer(torch.ones(3, 4))
    assert torch.equal(trainer.model.weight, before)
    assert make().resume(tmp_path) is not None


def test_a_model_that_is_observed_can_be_copied(accel):
    class Locked(accelcore.Observer):
        def __init__(self):
            self.lock, self.seen = threading.Lock(), []

        def output(self, module, output):
            self.seen.append(module)

    model, observer = nn.Linear(4, 2), Locked()
    optimizer = accel.optimizers.create("sgd", model.parameters())
    trainer = accel.trainer(model, optimizer, loss=loss_of, observers=[observer])
    copy.deepcopy(model)(torch.ones(3, 4))
    trainer(torch.ones(3, 4))
    assert observer.seen == ["", ""]

"""Gradients between backward and step, against float64: in which memory they are makes no difference."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import accelcore
from accelcore.apex import amp, optimizers

OURS, TORCHS = "ours", "torch's"
VARIANTS = pytest.mark.parametrize(
    ("level", "combine", "kind"),
    [
        *itertools.product(("O1", "O2"), (None, True), (OURS, TORCHS)),
        ("O0", None, OURS), ("O3", None, TORCHS),
    ],
    ids=lambda value: str(value),
)  # fmt: skip
X = torch.tensor([[0.5, -1.0], [2.0, 0.25]])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))


def created(kind, parameters, **options):
    options = {"lr": 0.1, "momentum": 0.9, **options}
    return optimizers.NpuFusedSGD(parameters, **options) if kind == OURS else torch.optim.SGD(parameters, **options)


def made(level, combine, kind, model=None, **options):
    model = model or net()
    options = {"loss_scale": 128.0, "combine_grad": combine, "verbosity": 0, **options}
    return amp.initialize(model, created(kind, model.parameters()), opt_level=level, **options)


def backward(loss, optimizer, **options):
    with amp.scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()


def losses(model):
    output = model(X.to(next(model.parameters()).dtype))
    return output.square().mean(), output[:, 0].exp().mean()


class Exact:
    """The same in float64, by torch alone."""

    def __init__(self):
        self.model = net().double()
        self.optimizer = created(TORCHS, self.model.parameters())

    def agrees_with(self, model, tolerance=2e-3):
        for ours, theirs in zip(model.parameters(), self.model.parameters(), strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


@VARIANTS
@pytest.mark.parametrize("zero", ["model", "to none", "to zero"])
def test_several_passes_add_up_until_they_are_zeroed(level, combine, kind, zero):
    model, optimizer = made(level, combine, kind)
    exact = Exact()
    for step in range(4):
        if zero == "model":
            model.zero_grad()
            exact.model.zero_grad()
        else:
            for each in (optimizer, exact.optimizer):
                each.zero_grad(set_to_none=zero == "to none")
        first, second = losses(model)
        backward(first, optimizer, delay_unscale=step == 1) if step == 1 else backward(first, optimizer)
        backward(losses(model)[1], optimizer)
        del second
        sum(losses(exact.model)).backward()
        optimizer.step()
        exact.optimizer.step()
    exact.agrees_with(model)


@VARIANTS
def test_masters_are_clipped_as_parameters_are(level, combine, kind):
    model, optimizer = made(level, combine, kind)
    exact = Exact()
    for step in range(3):
        optimizer.zero_grad()
        exact.optimizer.zero_grad()
        backward(losses(model)[0], optimizer)
        losses(exact.model)[0].backward()
        order = (2.0, math.inf, 1.0)[step]
        if step:
            norm = optimizer.clip_optimizer_grad_norm_fused(0.25, norm_type=order)
        else:
            norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.25)
        expected = nn.utils.clip_grad_norm_(exact.model.parameters(), 0.25, norm_type=order)
        torch.testing.assert_close(norm.double(), expected, rtol=1e-2, atol=0)
        optimizer.step()
        exact.optimizer.step()
    exact.agrees_with(model)


@VARIANTS
def test_the_fused_clipping_is_of_the_2_norm_of_all_together(level, combine, kind):
    model, optimizer = made(level, combine, kind)
    with pytest.raises(ValueError, match="no gradients"):
        optimizer.clip_optimizer_grad_norm_fused(1.0)
    backward(losses(model)[0], optimizer)
    masters = list(amp.master_params(optimizer))
    norm = torch.stack([master.grad.double().norm() for master in masters]).norm()
    torch.testing.assert_close(optimizer.clip_optimizer_grad_norm_fused(10.0).double(), norm, rtol=1e-3, atol=0)
    torch.testing.assert_close(optimizer.clip_optimizer_grad_norm_fused(0.1).double(), norm, rtol=1e-3, atol=0)
    clipped = torch.stack([master.grad.double().norm() for master in masters]).norm().item()
    assert clipped == pytest.approx(0.1, rel=1e-2)


@VARIANTS
def test_a_gradient_that_the_script_replaces_or_drops_counts(level, combine, kind):
    model, optimizer = made(level, combine, kind)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    backward(losses(model)[0], optimizer)
    masters = list(amp.master_params(optimizer))
    masters[0].grad = torch.full_like(masters[0], 0.5)
    masters[1].grad = None
    masters[2].grad = masters[2].grad * 0.0
    expected = masters[3].grad.clone()
    optimizer.step()
    moved = [was - now.detach() for was, now in zip(before, model.parameters(), strict=True)]
    torch.testing.assert_close(moved[0].float(), torch.full((3, 2), 0.05), rtol=0, atol=1e-3)
    assert not moved[1].any()
    assert not moved[2].any()
    torch.testing.assert_close(moved[3].float(), 0.1 * expected.float(), rtol=0, atol=1e-3)


@VARIANTS
def test_parameters_may_be_added_frozen_and_unused_between_steps(level, combine, kind):
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)])
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    exact = [torch.full_like(parameter, 0.5, dtype=torch.float64) for parameter in model.parameters()]
    optimizer = created(kind, model[:2].parameters(), momentum=0.0)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=128.0, combine_grad=combine, verbosity=0
    )

    def train(*numbers):
        optimizer.zero_grad()
        backward(sum(parameter.float().sum() for n in numbers for parameter in model[n].parameters()), optimizer)
        optimizer.step()
        for n in numbers:
            for value in exact[2 * n : 2 * n + 2]:
                value -= 0.1

    train(0, 1)
    train(1)
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.1})
    train(0, 2)
    model[0].requires_grad_(False)
    train(1, 2)
    model[0].requires_grad_(True)
    train(0)
    for parameter, value in zip(model.parameters(), exact, strict=True):
        torch.testing.assert_close(parameter.double(), value, rtol=0, atol=2e-3)
    for entry in optimizer.state.values():
        for value in entry.values():
            assert not isinstance(value, torch.Tensor) or value.dtype in (torch.float32, torch.float16)


@pytest.mark.parametrize("combine", [None, True])
@pytest.mark.parametrize("kind", [OURS, TORCHS])
def test_o2_unscales_in_fp32_so_that_what_fp16_cannot_hold_is_not_lost(combine, kind):
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = made("O2", combine, kind, model=model, loss_scale=2.0**16)
    tiny = 2.0**-30  # fp16's smallest number is 2**-24
    backward((model(torch.ones(1, 4)) * tiny).sum(), optimizer)
    (master,) = amp.master_params(optimizer)
    assert master.dtype == torch.float32
    assert master.grad.tolist() == [[tiny] * 4]
    optimizer.step()
    torch.testing.assert_close(master.detach(), torch.full((1, 4), -0.1 * tiny), rtol=1e-6, atol=0)


@pytest.mark.parametrize("combine", [None, True])
@pytest.mark.parametrize("kind", [OURS, TORCHS])
def test_a_hundred_small_updates_are_not_lost_at_o2(combine, kind):
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = made("O2", combine, kind, model=model)
    for group in optimizer.param_groups:
        group.update(lr=1e-4, momentum=0.0)
    for _ in range(100):
        optimizer.zero_grad()
        backward(model(torch.ones(1, 4)).sum(), optimizer)
        optimizer.step()
    assert model.weight.dtype == torch.float16
    torch.testing.assert_close(model.weight.float(), torch.full((1, 4), 0.99), rtol=1e-3, atol=0)


@pytest.mark.parametrize("combine", [None, True])
def test_backward_without_scale_loss_trains_where_there_are_no_masters(combine):
    model, optimizer = made("O1", combine, OURS)
    exact = Exact()
    for _ in range(2):
        for each, trained in ((model, optimizer), (exact.model, exact.optimizer)):
            trained.zero_grad()
            losses(each)[0].backward()
            trained.step()
    exact.agrees_with(model)


@pytest.mark.parametrize("kind", [OURS, TORCHS])
def test_backward_without_scale_loss_is_refused_where_there_are(kind):
    model, optimizer = made("O2", None, kind)
    losses(model)[0].backward()
    with pytest.raises(accelcore.AmpError, match="masters have none"):
        optimizer.step()


@VARIANTS
def test_a_step_without_gradients_does_nothing_as_with_torchs_optimizers(level, combine, kind):
    model, optimizer = made(level, combine, kind)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    backward(losses(model)[0], optimizer)
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(was, now) for was, now in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("kind", [OURS, TORCHS])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_is_in_no_model_is_trained_too(level, kind):
    model, temperature = net(), nn.Parameter(torch.ones(()))
    optimizer = created(kind, [*model.parameters(), temperature])
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    backward(losses(model)[0].detach() * temperature, optimizer)
    optimizer.step()
    assert temperature.item() < 1.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_sparse_gradients_add_up(level):
    model = nn.Embedding(4, 2, sparse=True)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    for tokens in ([0, 1], [1, 1]):
        backward(model(torch.tensor(tokens)).sum(), optimizer)
    optimizer.step()
    assert model.weight.float().tolist() == [[-1.0, -1.0], [-3.0, -3.0], [0.0, 0.0], [0.0, 0.0]]


def test_an_optimizer_that_is_named_twice_is_one():
    model, optimizer = made("O2", None, OURS)
    exact = Exact()
    backward(losses(model)[0], optimizer)
    backward(losses(model)[0], [optimizer, optimizer])
    sum([losses(exact.model)[0], losses(exact.model)[0]]).backward()
    optimizer.step()
    exact.optimizer.step()
    exact.agrees_with(model)


def test_scaling_within_scaling_is_refused():
    model, optimizer = made("O2", None, OURS, num_losses=2)
    with pytest.raises(accelcore.errors.AmpError, match="within"), amp.scale_loss(losses(model)[0], optimizer):
        backward(losses(model)[1], optimizer, loss_id=1)
    optimizer.zero_grad()
    backward(losses(model)[1], optimizer)
    optimizer.step()

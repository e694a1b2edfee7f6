"""Parameters that are not plain fp32 tensors of their own: flat, complex, with sparse gradients, bf16 with masters."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import accelcore
from accelcore.precision.policy import Policy


def test_a_parameter_that_lies_flat_is_saved_by_itself(accel):
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(2, 2))
    accel.trainer(model, accel.optimizers.create("adamw", model.parameters()), flat=True)
    saved = io.BytesIO()
    torch.save(model[1].weight, saved)
    assert len(saved.getvalue()) < 5000
    assert model[1].weight.untyped_storage().nbytes() == 16


@pytest.mark.parametrize("flat", [True, False])
def test_complex_parameters_are_trained_as_by_torch(accel, flat):
    def model():
        torch.manual_seed(0)
        return nn.ParameterList([torch.randn(3, dtype=torch.complex64), torch.randn(2)])

    one, other = model(), model()
    optimizer = accel.optimizers.create("adamw", one.parameters(), lr=0.1)
    trainer = accel.trainer(one, optimizer, loss=lambda m, _: (m[0] * m[1].sum()).abs().square().sum(), flat=flat)
    theirs = torch.optim.AdamW(other.parameters(), lr=0.1)
    for _ in range(4):
        trainer(None)
        theirs.zero_grad()
        (other[0] * other[1].sum()).abs().square().sum().backward()
        theirs.step()
    for mine, its in zip(one, other, strict=True):
        torch.testing.assert_close(mine, its)


class _Wave(nn.Module):
    """A real and a complex parameter, whose gradients have the negative and the conjugate bit."""

    def __init__(self):
        super().__init__()
        self.real, self.complex = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor([1 + 2j, 0.5j]))

    def forward(self, factor):
        product = torch.complex(torch.ones(()), self.real).conj() * factor
        return product.abs() + (self.complex.conj() * factor).real.square().sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_norm": 0.5},
        {"clip": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5)},
        {"loss_scale": "dynamic"},
        {"loss_scale": 64.0},
        {"loss_scale": "dynamic", "clip_norm": 0.5, "accumulate": 2},
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_gradients_with_the_negative_or_conjugate_bit_are_trained_as_by_torch(accel, name, options):
    one, other = _Wave(), _Wave()
    optimizer = accel.optimizers.create(name, one.parameters(), lr=0.1)
    trainer = accel.trainer(one, optimizer, loss=lambda model, factor: model(factor), flat=False, **options)
    theirs = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name](other.parameters(), lr=0.1)
    factors = torch.tensor([1 + 2j, 3 - 1j, -1j, 2])
    for factor in factors:
        trainer(factor)
    for window in factors.split(options.get("accumulate", 1)):
        for factor in window:
            (other(factor) / len(window)).backward()
        if len(window) == 1:
            assert other.real.grad.is_neg()
            assert other.complex.grad.is_conj()
        for parameter in other.parameters():
            parameter.grad = parameter.grad.resolve_neg().resolve_conj()
        if "clip" in "".join(options):
            nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
    for mine, its in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its)


def test_sparse_gradients_take_the_loop_and_the_error_says_so(accel):
    def embedding():
        torch.manual_seed(0)
        return nn.Embedding(5, 2, sparse=True)

    tokens = [torch.tensor([1, 1, 4]), torch.tensor([0, 4, 4])]
    for clip_norm in (None, 0.1):
        model, other = embedding(), embedding()
        optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.5, route="loop")
        trainer = accel.trainer(model, optimizer, loss=lambda m, b: m(b).square().mean(), clip_norm=clip_norm)
        theirs = torch.optim.SGD(other.parameters(), lr=0.5)
        for batch in tokens:
            trainer(batch)
            theirs.zero_grad()
            other(batch).square().mean().backward()
            other.weight.grad = other.weight.grad.to_dense()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(other.parameters(), clip_norm)
            theirs.step()
        torch.testing.assert_close(model.weight, other.weight)
    for options in ({}, {"flat": True}):
        model = embedding()
        trainer = accel.trainer(
            model, accel.optimizers.create("sgd", model.parameters()), loss=lambda m, b: m(b).sum(), **options
        )
        with pytest.raises(accelcore.TrainingError, match='route="loop"'):
            trainer(tokens[0])
        assert torch.equal(model.weight, embedding().weight)


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "per tensor"])
def test_fp32_moments_of_bf16_parameters_stay_fp32_however_they_are_loaded(accel, flat):
    def made():
        torch.manual_seed(0)
        model = nn.Linear(3, 2).bfloat16()
        return model, accel.optimizers.create("adamw", model.parameters(), lr=0.1)

    def prepare(model, optimizer):
        return accel.trainer(
            model, optimizer, loss=lambda m, b: m(b).float().square().mean(), precision=BF16, flat=flat
        )

    BF16 = Policy(model_dtype="bfloat16")
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(3)).bfloat16()
    model, optimizer = made()
    trainer = prepare(model, optimizer)
    for _ in range(3):
        trainer(x)
    state = optimizer.state_dict()
    moments = state["state"][0]["exp_avg"]
    assert moments.dtype == torch.float32
    assert not torch.equal(moments, moments.bfloat16().float())
    for late in (False, True):
        other, loaded = made()
        if not late:
            loaded.load_state_dict(state)
        prepare(other, loaded)
        if late:
            loaded.load_state_dict(state)
        assert torch.equal(loaded.state_dict()["state"][0]["exp_avg"], moments)

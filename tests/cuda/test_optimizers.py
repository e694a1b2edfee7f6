"""The compiled optimizers on a GPU: exact, without a wait of the host, and captured in graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accelcore.optim.formulas import FORMULAS

COMPILED = {
    "adadelta": {"weight_decay": 0.1},
    "adamp": {"weight_decay": 0.1},
    "bertadam": {"t_total": 10, "warmup": 0.3},
    "lamb": {"weight_decay": 0.1, "use_global_grad_norm": True},
    "rmsprop": {"momentum": 0.9, "centered": True},
    "rmsproptf": {"momentum": 0.9, "weight_decay": 0.1},
}
SHAPES = [(), (0, 3), (7,), (33, 40), (6, 5, 3, 3), (64, 128), (1000, 140)]


@pytest.fixture(params=sorted(COMPILED))
def made(request, accel):
    """An optimizer, its parameters, and the formula's for the same in float64 on the host."""
    name = request.param
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in SHAPES]
    parameters = [nn.Parameter(value.to(accel.device)) for value in start]
    exact = [nn.Parameter(value.double()) for value in start]
    optimizer = accel.optimizers.create(name, parameters, lr=0.01, **COMPILED[name])
    if optimizer.route != "compiled":
        pytest.skip(f"not compiled: {accel.optimizers.explain(name)[0].reason}")
    return optimizer, parameters, FORMULAS[name](exact, lr=0.01, **COMPILED[name]), exact


def give_gradients(parameters, exact, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for mine, true in zip(parameters, exact, strict=True):
        gradient = torch.randn(true.shape, generator=generator)
        mine.grad, true.grad = (scale * gradient).to(mine.device), gradient.double()


def assert_alike(parameters, exact):
    for mine, true in zip(parameters, exact, strict=True):
        torch.testing.assert_close(mine.detach().cpu().double(), true.detach(), rtol=1e-5, atol=1e-5)


def test_it_follows_the_formula_and_never_waits(made):
    optimizer, parameters, oracle, exact = made
    for step in range(6):
        give_gradients(parameters, exact, step)
        if step == 2:  # compiled by now
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        oracle.step()
        optimizer.param_groups[0]["lr"] = oracle.param_groups[0]["lr"] = 0.01 / (step + 1)
    assert_alike(parameters, exact)


def test_it_unscales_and_skips_by_itself(made):
    optimizer, parameters, oracle, exact = made
    for step in range(4):
        give_gradients(parameters, exact, step, scale=1024.0)
        optimizer.grad_scale = torch.tensor(1024.0, device=parameters[0].device)
        optimizer.found_inf = torch.tensor(float(step == 2), device=parameters[0].device)
        if step == 2:
            parameters[3].grad[0] = torch.inf
        else:
            oracle.step()
        optimizer.step()
    assert_alike(parameters, exact)
    assert {entry["step"].item() for entry in optimizer.state.values()} == {3.0}


def test_a_step_is_captured(accel):
    def train(graph):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = accel.optimizers.create("lamb", model.parameters(), lr=0.01, weight_decay=0.1)
        if optimizer.route != "compiled":
            pytest.skip("nothing can be compiled here")
        trainer = accel.trainer(model, optimizer, loss=lambda model, batch: model(batch).square().mean(), graph=graph)
        for step in range(10):
            batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            trainer(accel.runtime.to_device(batch))
        return [parameter.detach().cpu() for parameter in model.parameters()]

    torch.testing.assert_close(train(graph=True), train(graph=False), rtol=1e-4, atol=1e-5)

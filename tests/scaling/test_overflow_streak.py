"""Many overflows in a row are said aloud, by name; and what a step costs in waiting for the device."""

from __future__ import annotations

import logging
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.scaling.scaled_steps import INF, NAN, ROUTES, in_use, parameter, train_step


def told(caplog):
    return [record.message for record in caplog.records if "in a row" in record.message]


@pytest.mark.parametrize("route", ROUTES)
def test_twenty_overflows_in_a_row_name_the_first_bad_parameter(accel, caplog, route):
    caplog.set_level(logging.WARNING, "accelcore")
    scaler, weights = in_use(accel.scaler.create()), [parameter(), parameter(1.0), parameter(1.0)]
    options = {"lr": 0.5} if route == "native" else {"lr": 0.5, "route": route}
    optimizer = accel.optimizers.create("adamw", [{"params": weights[:1]}, {"params": weights[1:]}], **options)

    def step(value):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        weights[2].grad = torch.tensor([value])
        scaler.step(optimizer)
        scaler.update()

    for _ in range(19):
        step(INF)
    step(1.0)
    for _ in range(19):
        step(NAN)
    assert told(caplog) == []
    step(NAN)
    (line,) = told(caplog)
    assert line.startswith("20 updates in a row were skipped")
    assert "loss scale is 1." in line
    assert "parameter 1 of group 1, of shape (1,)" in line
    for _ in range(20):
        step(INF)
    assert [line.split()[0] for line in told(caplog)] == ["20", "40"], "it is said again, and not each time"


def test_named_parameters_are_told_by_name(accel, caplog):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    scaler, optimizer = accel.scaler.create(), torch.optim.SGD(model.named_parameters(), lr=0.5)
    for _ in range(20):
        optimizer.zero_grad()
        scaler.scale(model[1](model[0](torch.ones(1, 2)).detach()).sum() * INF).backward()
        scaler.step(optimizer)
        scaler.update()
    assert "that of 1.weight" in told(caplog)[0]


@pytest.mark.parametrize("route", ROUTES)
def test_updates_that_a_graph_records_are_reported_by_warn_alone(accel, caplog, route):
    scaler, weight = in_use(accel.scaler.create()), parameter()
    optimizer = accel.optimizers.create("adamw", [weight], **({} if route == "native" else {"route": route}))
    for _ in range(20):
        weight.grad = torch.full_like(weight, INF)
        scaler.step(optimizer)
        scaler.update(captured=True)
        assert told(caplog) == []
    scaler.warn()
    scaler.warn()
    (line,) = told(caplog)
    assert line.startswith("20 updates in a row were skipped")
    assert "graph=True" in line


@pytest.mark.parametrize("precision", ["fp16", "O2"])
@pytest.mark.parametrize("flat", [True, False])
def test_a_trainer_knows_the_names(accel, caplog, precision, flat):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    trainer = accel.trainer(
        model,
        accel.optimizers.create("adamw", model.parameters()),
        loss=lambda m, x: m(x).sum() + (m[1].weight * INF).sum(),
        precision=precision,
        flat=flat,
    )
    for _ in range(20):
        trainer(torch.ones(1, 2))
    (line,) = told(caplog)
    assert "that of 1.weight" in line


# Waiting for the device.


class Waits(TorchDispatchMode):
    """Counts what makes the host wait."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.name() in ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"):
            self.count += 1
        return function(*arguments, **(options or {}))


@contextmanager
def waits(at_most):
    with Waits() as counted:
        yield
    assert counted.count == at_most


@pytest.mark.parametrize(("route", "expected"), [("fused", 0), ("foreach", 1), ("loop", 1)])
@pytest.mark.parametrize("value", [1.0, INF])
def test_a_step_waits_once_and_not_at_all_where_the_kernel_skips(accel, route, expected, value):
    scaler, weight = in_use(accel.scaler.create()), parameter()
    if route == "loop":
        optimizer = torch.optim.SGD([weight], lr=0.5, foreach=False)
    else:
        optimizer = accel.optimizers.create("sgd", [weight], lr=0.5, route=route)
    train_step(scaler, optimizer, weight, (1.0, 1.0))
    with waits(expected):
        train_step(scaler, optimizer, weight, (value, 1.0))


@pytest.mark.parametrize("precision", ["fp16", "O1", "O2"])
@pytest.mark.parametrize(("route", "expected"), [("fused", 0), ("foreach", 1)])
def test_a_trainers_step_waits_no_more(accel, precision, route, expected):
    model = nn.Linear(4, 2)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1, momentum=0.9, route=route)
    trainer = accel.trainer(
        model, optimizer, loss=lambda m, x: m(x).float().sum(), precision=precision, clip_norm=1.0, accumulate=2
    )
    for _ in range(2):
        trainer(torch.ones(1, 4))
    with waits(expected):
        for _ in range(2):
            trainer(torch.ones(1, 4))

"""Losses with a loss scale of their own in one trainer, against one loss without any."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import accelcore
from accelcore import Policy
from tests.training.own_scale_ranks import PRECISIONS, Two, data, losses, made, micro

FLAT = pytest.mark.parametrize("flat", [True, False], ids=["flat", "per tensor"])
SMALL = 1e-9  # its gradients are 0 in fp16, and under a scale of 128 still are


@FLAT
@pytest.mark.parametrize("names", [(None, "two"), ("one", "two"), ("same", "same")], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "clip_norm": 0.1}], ids=["plain", "accumulated and clipped"])
def test_gradients_are_those_of_the_sum(accel, precision, flat, names, options):
    model = Two().double()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate = options.get("accumulate", 1)
    for number, x in enumerate(data(), 1):
        one, two = model(x.double())
        ((one.square().mean() + 3 * two.mean()) / accumulate).backward()
        if number % accumulate == 0:
            if "clip_norm" in options:
                nn.utils.clip_grad_norm_(model.parameters(), options["clip_norm"])
            plain.step()
            plain.zero_grad()
    trainer = made(accel, precision, flat=flat, **options)
    for x in data():
        micro(trainer, x, 3.0, names)
    tolerance = 1e-5 if precision == "fp32" else 3e-3
    for found, expected in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@FLAT
@pytest.mark.parametrize("precision", ["fp16", "O2"])
def test_only_the_scale_of_the_loss_that_overflowed_falls(accel, precision, flat):
    trainer = made(accel, precision, flat=flat)
    micro(trainer, data()[0])
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    own = lambda: trainer.loss_scales["two"].state_dict()  # noqa: E731
    scale, scale_of_two = trainer.scaler.state_dict()["scale"], own()["scale"]
    micro(trainer, data()[0], math.inf)
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), before, strict=True))
    assert trainer.skipped == 1
    assert (trainer.scaler.state_dict()["scale"], own()["scale"]) == (scale, scale_of_two / 2)
    micro(trainer, data()[0])
    assert trainer.skipped == 1
    assert not any(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), before, strict=True))


@FLAT
def test_small_gradients_survive_beside_large_ones_in_an_fp16_model(accel, flat):
    """The second loss needs a scale of 2**24, by which the first would overflow."""
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
    trainer = accel.trainer(
        model,
        optimizer,
        flat=flat,
        precision=Policy(model_dtype="float16", cast_boundary=True),
        loss_scale=accelcore.LossScale(init=2.0**24),
    )
    before = model.two.bias.item()
    x = torch.ones(1, 4)
    trainer.backward(losses(trainer.forward, x)[1] * SMALL, scale="two")
    trainer.update()
    assert model.two.bias.item() == pytest.approx(before - 1e6 * SMALL, rel=2e-3)


@pytest.mark.parametrize("within", [False, True], ids=["between windows", "within a window"])
@pytest.mark.parametrize("precision", ["fp16", "O2", "static"])
def test_scales_are_saved_and_restored(accel, tmp_path, precision, within):
    first, second = (made(accel, precision, accumulate=2) for _ in range(2))
    micro(first, data()[0], 3.0 if precision == "static" else math.inf)  # a static scale skips nothing
    micro(first, data()[0])
    if within:
        micro(first, data()[1], 3.0)
    first.save(tmp_path)
    second.resume(tmp_path)
    states = [{name: scaler.state_dict() for name, scaler in t.loss_scales.items()} for t in (first, second)]
    assert states[0] == states[1]
    for trainer in (first, second):
        for x in data()[1:]:
            micro(trainer, x)
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_ddp_refuses_and_combine_ddp_takes_them(fork_ranks, tmp_path):
    ended = [rank.finish() for rank in fork_ranks(Path(__file__).with_name("own_scale_ranks.py"), tmp_path)]
    assert [rank.returncode for rank in ended] == [0, 0], "\n".join(rank.stderr for rank in ended)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1], "the ranks have parted"
    assert "combine_ddp" in found[0]["refused"]
    model = Two().double()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.cat(data()[:2]).double()
    one, two = model(x)
    (one.square().mean() + 3 * two.mean()).backward()
    plain.step()
    for precision in ("fp16", "O2"):
        assert found[0][precision]["skipped"] == 1
        for ours, expected in zip(found[0][precision]["weights"], model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(ours).double(), expected, rtol=3e-3, atol=3e-3)

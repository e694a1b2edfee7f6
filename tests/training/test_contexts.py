"""What a trainer enters and leaves: modes of arithmetic, and its own life."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from toys import data, loss_of, net, precision_watch

import accelcore
from accelcore.parity.compare import compare


@pytest.mark.parametrize("options", [{}, {"fp32": "ieee"}, {"precision": "bf16", "fp32": "ieee"}])
def test_a_trainer_that_is_dropped_is_gone(accel, options):
    gc.disable()  # what only the collector finds holds the device's memory until then
    try:
        model = nn.Linear(3, 1)
        trainer = accel.trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda m, x: m(x).sum(), **options
        )
        trainer(torch.ones(2, 3))
        gone = weakref.ref(trainer)
        del trainer
        assert gone() is None
    finally:
        gc.enable()


def test_fp32_mode_holds_in_forward_and_backward_and_nowhere_else(accel):
    watched, seen = precision_watch()
    model = net()
    trainer = accel.trainer(
        model,
        accel.optimizers.create("sgd", model.parameters()),
        loss=lambda m, b: watched(loss_of(m, b)),
        fp32="ieee",
    )
    torch.set_float32_matmul_precision("medium")
    try:
        trainer(data(1)[0])
        with trainer.autocast():
            loss = watched(loss_of(model, data(1)[0]))
        trainer.backward(loss)
        assert seen == ["highest"] * 4
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"precision": "O2"}, {"flat": True}])
def test_the_default_device_makes_no_difference(accel, tmp_path, options):
    def train(default, folder):
        torch.manual_seed(0)
        model, fresh, batches = net(), net(), data(6)
        with torch.device(default), accelcore.Record(folder / "recording"):
            optimizer = accel.optimizers.create("adamw", model.parameters())
            trainer = accel.trainer(model, optimizer, loss=loss_of, **options)
            for batch in batches[:3]:
                trainer(batch)
            trainer.save(folder / "checkpoint")
        with torch.device(default):
            optimizer = accel.optimizers.create("adamw", fresh.parameters())
            resumed = accel.trainer(fresh, optimizer, loss=loss_of, **options)
            resumed.resume(folder / "checkpoint")
            losses = [resumed(batch).item() for batch in batches[3:]]
            mean = resumed.evaluate(batches).mean(lambda batch: loss_of(resumed.model, batch).item())
        return losses, mean, [parameter.detach() for parameter in fresh.parameters()]

    found, expected = train("meta", tmp_path / "meta"), train("cpu", tmp_path / "cpu")
    assert found[:2] == expected[:2]
    torch.testing.assert_close(found[2], expected[2], rtol=0, atol=0)
    with torch.device("meta"):
        assert compare(tmp_path / "meta" / "recording", tmp_path / "cpu" / "recording").exact

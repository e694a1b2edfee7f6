"""What a trainer enters and leaves: modes of arithmetic, and its own life."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 2))


def data(count: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 6, generator=generator), torch.randn(8, 2, generator=generator)) for _ in range(count)]


def loss_of(model, batch):
    return mse_loss(model(batch[0]), batch[1])


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
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(torch.get_float32_matmul_precision())
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(torch.get_float32_matmul_precision())
            return gradient

    model = net()
    trainer = accel.trainer(
        model,
        accel.optimizers.create("sgd", model.parameters()),
        loss=lambda m, b: Watch.apply(loss_of(m, b)),
        fp32="ieee",
    )
    torch.set_float32_matmul_precision("medium")
    try:
        trainer(data(1)[0])
        with trainer.autocast():
            loss = Watch.apply(loss_of(model, data(1)[0]))
        trainer.backward(loss)
        assert seen == ["highest"] * 4
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")

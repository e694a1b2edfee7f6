"""An optimizer that raises within its step, such as for lack of memory: the trainer is not used again."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accelcore


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        self.state["rounds"] = [1]
        raise torch.OutOfMemoryError("planted")


def _loss(model, batch):
    return mse_loss(model(batch[0]), batch[1])


def _optimizers(accel, parameters):
    yield Failing(parameters)
    yield torch.optim.AdamW(parameters, fused=True)
    yield accel.optimizers.create("adamw", parameters, route="fused")


@pytest.mark.parametrize("number", range(3))
def test_a_trainer_whose_optimizer_raised_shows_its_error_and_trains_no_more(accel, number):
    model, batch = nn.Linear(5, 2), (torch.randn(6, 5), torch.randn(6, 2))
    optimizer = list(_optimizers(accel, list(model.parameters())))[number]
    trainer = accel.trainer(model, optimizer, loss=_loss)
    with (
        patch.object(torch, "_fused_adamw_", side_effect=torch.OutOfMemoryError("planted")),
        pytest.raises(torch.OutOfMemoryError, match="planted"),
    ):
        trainer(batch)
    for _ in range(2):
        with pytest.raises(accelcore.TrainingError, match=r"(?s)optimizer raised.*planted.*resume"):
            trainer(batch)

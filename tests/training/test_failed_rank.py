"""A rank on which a step failed does not go on alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import accelcore


@pytest.mark.parametrize("place", ["forward", "no gradient", "reduce"])
def test_in_a_job_a_rank_that_failed_alone_does_not_go_on(accel, place):
    """The others may have stepped without it, and its next all_reduce would meet another of theirs."""

    class Two(type(accel.collectives)):
        rank, world_size = 0, 2
        broken = False

        def all_reduce(self, tensor, op="sum"):
            if self.broken:
                raise torch.OutOfMemoryError("planted")
            return tensor if op != "sum" else tensor.mul_(2)  # the other rank has the same

        def broadcast(self, tensor, src=0):
            return tensor

        def barrier(self):
            pass

    def loss(model, batch):
        if broken and place == "forward":
            raise torch.OutOfMemoryError("planted")
        if broken and place == "no gradient":
            return batch.sum()
        return model(batch).square().mean()

    broken = False
    two, declared = Two(accel.device, "gloo"), dataclasses.replace(accel.capabilities, parallel=("none", "combine_ddp"))
    job = dataclasses.replace(accel, collectives=two, capabilities=declared)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = job.trainer(model, optimizer, loss=loss, parallel="combine_ddp")
    batch = torch.ones(1, 3)
    trainer(batch)
    broken, two.broken = True, place == "reduce"
    with pytest.raises(accelcore.TrainingError if place == "no gradient" else torch.OutOfMemoryError):
        trainer(batch)
    broken, two.broken = False, False
    with pytest.raises(accelcore.TrainingError, match="cannot go on"):
        trainer(batch)
    with pytest.raises(accelcore.TrainingError, match="cannot go on"):
        trainer.backward(trainer.forward(batch).sum())
    assert trainer.steps == 1

"""Offloading on the emulated NPU: results, copies and waits. That copies overlap other work needs a device to show."""

from __future__ import annotations

import pytest
import torch
from accelcore_npu_emulator import counters
from torch import nn

from accelcore.errors import TrainingError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, rows):
        return rows + self.outer(torch.tanh(self.inner(rows)))


def make(accel, part=Block, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(part() for _ in range(3)))
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=0.01)
    return accel.trainer(model, optimizer, loss=lambda model, rows: model(rows).square().mean(), **options)


def rows(accel, number=0):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(number)).to(accel.device)


def copies(cost, what):
    return sum(count for name, count in cost.copies.items() if name == what)


def test_each_tensor_is_copied_there_and_back_and_the_host_waits_for_none(accel):
    plain, offloaded = make(accel), make(accel, offload=Block)
    for trainer in (plain, offloaded):  # state and workspaces are made
        trainer(rows(accel))
    batch = rows(accel, 1)
    with counters.count() as without:
        expected = plain(batch)
    with counters.count() as cost:
        loss = offloaded(batch)
    assert torch.equal(loss, expected)
    assert max(without.synchronizations.total(), cost.synchronizations.total()) <= 1, "torch_npu may wait, once"
    there, back = (copies(cost, what) - copies(without, what) for what in ("device to host", "host to device"))
    assert there == back == 9, "each block saves the inputs of two Linear layers, and what tanh returns"


def test_a_graph_that_is_kept_can_be_read_twice(accel):
    trainer = make(accel, offload=Block)
    loss = trainer.forward(rows(accel)).square().mean()
    first = torch.autograd.grad(loss, list(trainer.model.parameters()), retain_graph=True)
    again = torch.autograd.grad(loss, list(trainer.model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_nothing_stays_on_the_device_between_forward_and_backward_or_after(accel):
    held = {}
    for name, options in {"plain": {}, "offloaded": {"offload": Block}}.items():
        trainer, batch = make(accel, **options), rows(accel)
        trainer(batch)
        before = accel.runtime.memory().used
        output = trainer.forward(batch)
        held[name] = accel.runtime.memory().used - before
        del output
        assert accel.runtime.memory().used == before
    assert held["offloaded"] < held["plain"] / 3


class InPlace(Block):
    def forward(self, rows):
        hidden = torch.tanh(self.inner(rows))
        hidden.detach().mul_(2)  # tanh saved its result
        return self.outer(hidden)


def test_a_saved_tensor_that_is_changed_in_place_is_refused(accel):
    """Without offloading, torch refuses it; a copy beside other work could have either value."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        make(accel, InPlace)(rows(accel))
    with pytest.raises(TrainingError, match=r"\(8, 64\) was changed in place"):
        make(accel, InPlace, offload=InPlace)(rows(accel))

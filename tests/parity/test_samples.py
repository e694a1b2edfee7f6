"""Samples are of the values that a hook saw, although they are copied later; what waits for it is not kept alive."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

import accelcore
from accelcore.layerwise import distance
from accelcore.parity.recording import Reader

STEPS = 4


class Net(nn.Module):
    """Changes the output of its first layer in place from a step on, and the gradient of its last one in each."""

    def __init__(self, since):
        super().__init__()
        self.first, self.last, self.since, self.step = nn.Linear(3, 4), nn.Linear(4, 2), since, 0

    def forward(self, x):
        self.step += 1
        hidden = self.first(x)
        if self.step >= self.since:
            hidden.mul_(2)
        return self.last(hidden)


def train(since, expected=None):
    torch.manual_seed(0)
    model = Net(since)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x = torch.randn(5, 3)
        if expected is not None:
            expected.append({"output": (x @ model.first.weight.detach().T + model.first.bias.detach()).flatten()})
        optimizer.zero_grad()
        model(x).square().mean().backward()
        gradient = model.last.weight.grad
        if expected is not None:
            expected[-1]["gradient"] = gradient.flatten().clone()
        gradient.mul_(0.5)
        if expected is not None:
            expected[-1]["reduced"] = gradient.flatten().clone()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("since", [1, 3])
def test_samples_are_of_what_a_hook_saw_although_it_is_changed_in_place_after_that(tmp_path, since):
    plain, expected = train(since), []
    with accelcore.Record(tmp_path / "ref"):
        assert all(map(torch.equal, plain, train(since, expected)))
    reader = Reader(tmp_path / "ref" / "rank-00000")
    for number, values in enumerate(expected, start=1):
        seen = {(each.event.kind, each.event.module, each.event.item): each.values for each in reader.step(number).seen}
        torch.testing.assert_close(seen["gradient", "last", "weight"], values["gradient"])
        torch.testing.assert_close(seen["reduced", "last", "weight"], values["reduced"])
        if number == since == 3:  # it was not known that the output would be changed
            assert ("output", "first", "0") not in seen
        else:
            torch.testing.assert_close(seen["output", "first", "0"], values["output"])


def test_a_graph_without_a_backward_pass_is_freed(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with accelcore.Record(tmp_path / "ref", model=model, optimizer=optimizer):
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        left = model(torch.ones(2, 3))
        left.grad_fn.metadata["kept"] = kept = torch.ones(1)
        kept = weakref.ref(kept)
        del left
        assert kept() is None
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_another_mask_is_told_from_another_result_beside_rounding(share):
    torch.manual_seed(0)
    values = torch.randn(200)
    one, other = (torch.rand(2, 200) >= share).unbind()
    assert distance(values * one, values * (1 + 1e-6) * other).masks
    assert not distance(values * one, 1.5 * values * one).masks
    assert not distance(values * one, values * (1 + 1e-6) * one).masks


@pytest.mark.parametrize("masked", [float("-inf"), float("nan")])
def test_equal_masks_hide_no_difference_beside_them(masked):
    recorded, replayed = torch.tensor([[masked, 1.0, 1.0]]), torch.tensor([[masked, 1.0, 1.5]])
    assert distance(recorded, replayed).ratio(2**-23) == pytest.approx(2**23 * (0.25 / 3) ** 0.5, rel=1e-6)
    assert distance(recorded, torch.tensor([[0.0, 1.0, 1.0]])).error == float("inf")

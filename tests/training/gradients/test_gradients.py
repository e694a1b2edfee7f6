"""Gradients that are exchanged: what comes back lies as its parameter does."""

from __future__ import annotations

import torch
from torch import nn

from accelcore.optim.flat.memory import Slot
from accelcore.training.gradients import PerTensor


def exchange(gradients, parameters):
    """Give the parameters gradients, but the last, have them exchanged by a job of one rank; those that were given."""
    given = [torch.randn_like(parameter) for parameter in parameters[:-1]]
    for parameter, gradient in zip(parameters, [*given, None], strict=True):
        parameter.grad = None if gradient is None else gradient.clone()
    gradients.collect()
    gradients.reduce(lambda packed: None)
    return given


def test_gradients_come_back_with_the_strides_that_parameters_have_by_then():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(5, 2).double(), nn.Linear(2, 2))
    parameters = list(model.parameters())
    gradients = PerTensor([Slot(name, 0, each, each) for name, each in model.named_parameters()])
    for memory_format in (torch.contiguous_format, torch.channels_last, torch.channels_last, torch.contiguous_format):
        gradients.clear()  # as at the end of a window: a module takes the gradients that it has along
        model.to(memory_format=memory_format)
        given = exchange(gradients, parameters)
        for parameter, gradient in zip(parameters, given, strict=False):
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)
            assert parameter.grad.stride() == parameter.stride()
        assert parameters[-1].grad is None
        assert gradients.received == [True] * len(given) + [False]

"""A call of every operator of torch's that draws random numbers, for tests on several devices.

Each is given a device, and tensors on it only where it needs them.
"""

from __future__ import annotations

import torch
from torch.nn import functional

aten = torch.ops.aten


def _weights(*shapes, device):
    return [torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).to(device) for shape in shapes]


def _recurrent(operator, gates, *, packed):
    def call(device):
        layer = [(gates * 4, 4), (gates * 4, 4), (gates * 4,), (gates * 4,)]
        weights = _weights(*layer, *layer, device=device)
        state = torch.zeros(2, 3, 4, device=device)
        states = [state, state] if gates == 4 else state
        steps = torch.linspace(-1, 1, 60, device=device).view(5, 3, 4)
        if packed:
            sizes = torch.tensor([3, 3, 3, 3, 3])
            return operator(steps.view(15, 4), sizes, states, weights, True, 2, 0.5, True, False)
        return operator(steps, states, weights, True, 2, 0.5, True, False, False)

    return call


def _ones(*shape, device, dtype=torch.float32):
    return torch.ones(*shape, device=device, dtype=dtype)


def _attended(attend):
    def call(device):
        query = torch.linspace(-1, 1, 2 * 2 * 8 * 4, device=device).view(2, 2, 8, 4)
        return attend(query, query, query)

    return call


def _filled(name, *arguments, dtype=torch.float32):
    """In place, and the forms that return a new tensor or write into another."""
    fill = getattr(aten, f"{name}_").default
    return {
        f"{name}_": lambda device: fill(torch.empty(5, 7, device=device, dtype=dtype), *arguments),
        name: lambda device: getattr(aten, name).default(torch.empty(5, 7, device=device), *arguments),
        f"{name}.out": lambda device: getattr(aten, name).out(
            torch.empty(5, 7, device=device), *arguments, out=torch.empty(0, device=device)
        ),
    }


def _made(name, *arguments, suffixes=("", "generator"), **options):
    """Made anew, with and without a generator, and into another tensor."""
    packet = getattr(aten, name)
    calls = {}
    for overload in suffixes:
        own = {"generator": torch.Generator().manual_seed(5)} if "generator" in overload else {}
        form = f".{overload}" if overload else ""
        operator = getattr(packet, overload or "default")
        ...
    return calls



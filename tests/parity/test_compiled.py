"""Compiled models: compiled code is the same under a recording."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import accelcore


def train(backend, watch):
    """Train under `watch(model=, optimizer=)` what this backend of torch.compile makes."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Dropout(0.2), nn.Linear(12, 2))
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with watch(model=compiled, optimizer=optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            compiled(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_a_recorded_run_of_compiled_code_has_the_bits_of_a_plain_one(tmp_path, backend):
    plain = train(backend, lambda **of: nullcontext())
    recorded = train(backend, partial(accelcore.Record, tmp_path / "ref"))
    replay = {}

    def watch(**of):
        replay["run"] = accelcore.Replay(tmp_path / "ref", **of)
        return replay["run"]

    again = train(backend, watch)
    for others in (recorded, again):
        assert all(torch.equal(one, other) for one, other in zip(plain, others, strict=True))
    result = replay["run"].result
    assert result.agrees, result
    assert result.exact

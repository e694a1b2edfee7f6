from __future__ import annotations

import pytest
import torch
import torch_npu
from torch import nn


def weight(accel, size=3):
    return nn.Parameter(torch.ones(size, device=accel.device))


def step(scaler, optimizer, parameter, factor=1.0):
    optimizer.zero_grad()
    scaler.scale((parameter * factor).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_no_fused_kernel_is_trusted_to_unscale_or_to_skip(accel, kind, monkeypatch):
    """torch_npu's AdamW kernel, as published, takes `grad_scale` and `found_inf` and looks at neither."""
    name = f"_fused_{kind.__name__.lower()}_"
    kernel, calls = getattr(torch, name), []

    def careless(*arguments, grad_scale=None, found_inf=None, **keywords):
        calls.append((grad_scale, found_inf))
        return kernel(*arguments, **keywords)

    monkeypatch.setattr(torch, name, careless)
    parameter = weight(accel)
    optimizer = kind([parameter], lr=0.5, fused=True)
    scaler = accel.scaler.create(init=1024.0)
    step(scaler, optimizer, parameter, factor=float("nan"))
    assert parameter.detach().cpu().tolist() == [1.0, 1.0, 1.0]
    step(scaler, optimizer, parameter, factor=1e-3)
    wanted = nn.Parameter(torch.ones(3))
    twin = kind([wanted], lr=0.5, foreach=False)
    wanted.grad = torch.full((3,), 1e-3)
    twin.step()
    torch.testing.assert_close(parameter.detach().cpu(), wanted.detach())
    assert set(calls) == {(None, None)}
    assert optimizer._step_supports_amp_scaling, "the optimizer is as it was"


def test_state_goes_to_torchs_scaler_and_back(accel):
    scaler = accel.scaler.create(init=1024.0, interval=5)
    parameter = weight(accel)
    optimizer = accel.optimizers.create("sgd", [parameter], lr=0.1)
    for _ in range(3):
        step(scaler, optimizer, parameter)
    torchs = torch.amp.GradScaler("cpu")
    torchs.load_state_dict(scaler.state_dict())
    assert torchs.state_dict().items() < scaler.state_dict().items()
    torch_npu.npu.amp.GradScaler().load_state_dict(scaler.state_dict())
    other = accel.scaler.create()
    other.load_state_dict(torchs.state_dict())
    assert other.state_dict() == scaler.state_dict()

"""A loop written by hand, and the trainer's beside it, for the tests of several devices."""

from __future__ import annotations

import pytest
import torch

import accelcore


def trains_in_fp16_as_by_hand(accel):
    """An fp16 model with fp32 masters and a dynamic loss scale."""

    def network():
        torch.manual_seed(4)
        return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def loss_of(model, inputs):
        return torch.nn.functional.mse_loss(model(inputs.half()).float(), inputs.sum(1, keepdim=True))

    data = torch.randn(10, 32, 4, generator=torch.Generator().manual_seed(5))
    masters, model, scale, expected = network(), network().half(), 2.0**16, []
    optimizer = torch.optim.AdamW(masters.parameters(), lr=0.05)
    for inputs in data:
        model.load_state_dict(masters.state_dict())
        loss = loss_of(model, inputs)
        model.zero_grad()
        (loss * scale).backward()
        expected.append(loss.item())
        for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
            master.grad = parameter.grad.float() / scale
        if all(parameter.grad.isfinite().all() for parameter in model.parameters()):
            optimizer.step()
        else:
            scale /= 2
    model = network()
    trainer = accel.trainer(
        model,
        accel.optimizers.create("adamw", model.parameters(), lr=0.05),
        loss=loss_of,
        precision=accelcore.Policy(model_dtype="float16", loss_scale="dynamic"),
    )
    found = [trainer(inputs).item() for inputs in accel.runtime.to_device(data)]
    assert found == pytest.approx(expected, rel=1e-3)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert trainer.scaler.state_dict()["scale"] == scale
    assert trainer.skipped == 16 - torch.tensor(scale).log2().item()

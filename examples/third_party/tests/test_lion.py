"""Lion on hostchip, compared with its formula in double precision on the CPU."""

import torch

import accelcore


def test_lion_steps_as_its_formula():
    accel = accelcore.select("hostchip")
    value = torch.linspace(-1, 1, 6, device=accel.device).requires_grad_()
    expected = torch.linspace(-1, 1, 6, dtype=torch.float64)
    mean = torch.zeros(6, dtype=torch.float64)
    optimizer = accel.optimizers.create("lion", [value], lr=0.1, decay=0.01)
    for number in range(1, 4):
        gradient = torch.linspace(1, -2, 6, dtype=torch.float64) / number
        value.grad = gradient.to(accel.device, torch.float32)
        optimizer.step()
        step = (0.9 * mean + 0.1 * gradient).sign()
        expected = expected * (1 - 0.1 * 0.01) - 0.1 * step
        mean = 0.99 * mean + 0.01 * gradient
    found = value.detach().cpu().double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_trainer_takes_it():
    accel = accelcore.select("hostchip")
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    values = model.parameters()
    optimizer = accel.optimizers.create("lion", values, lr=0.01)
    trainer = accel.trainer(model, optimizer, loss=lambda m, x: m(x).square().mean())
    losses = [float(trainer(torch.ones(2, 3))) for _ in range(5)]
    assert losses[-1] < losses[0]

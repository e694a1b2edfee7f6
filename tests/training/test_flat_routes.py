"""Routes that update flat memory only, and the state of flat memory as others see it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accelcore
from accelcore import Policy, UnsupportedError
from accelcore.optim.engine import Engine


class Packed(Engine, torch.optim.SGD):
    """Takes 1-D tensors only, and is told which parameters they hold."""

    def place_runs(self, runs):
        self.names = [[slot.name for slot in run.slots] for run in runs]
        assert all(run.value.dim() == 1 for run in runs)

    def update(self, found_inf, grad_scale):
        torch.optim.SGD.step(self)


@pytest.fixture
def accel():
    backend = accelcore.select("cpu")
    backend.optimizers.register("packed", "flat", Packed, memory="flat", supports=_float32_only)
    backend.optimizers.register("sgd", "packed", Packed, priority=50, memory="flat", supports=_float32_only)
    return backend


def _float32_only(request):
    return None if all(parameter.dtype == torch.float32 for parameter in request.parameters) else "float32 only"


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 1))


def test_a_class_with_place_runs_that_is_no_engine_is_refused(accel):
    class Unplaced(torch.optim.SGD):
        def place_runs(self, runs):
            raise AssertionError

    accel.optimizers.register("unplaced", "flat", Unplaced, memory="flat")
    with pytest.raises(accelcore.PluginError, match=r"(?s)Unplaced.*Engine"):
        accel.optimizers.create("unplaced", [nn.Parameter(torch.ones(2))])


def step(trainer, dtype=torch.float32):
    trainer.backward(trainer.forward(torch.ones(2, 600, dtype=dtype)).float().square().mean())
    trainer.update()


def test_it_is_taken_for_fp32_masters_however_large_they_are(accel):
    model = network().bfloat16()
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    assert optimizer.route != "packed"
    trainer = accel.trainer(model, optimizer)
    step(trainer, torch.bfloat16)
    assert optimizer.route == "packed"
    assert optimizer.implementation.names == [["0.weight", "0.bias", "1.weight", "1.bias"]]


def test_it_is_left_out_where_parameters_keep_their_own_memory(accel):
    model = network()
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    assert optimizer.route == "packed"
    step(accel.trainer(model, optimizer, flat=False))
    assert optimizer.route == "native"


def test_where_no_other_can_take_its_place_the_model_stays_as_it_was(accel):
    model = network()
    optimizer = accel.optimizers.create("packed", model.parameters(), lr=0.1)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(UnsupportedError, match="flat memory only"):
        accel.trainer(model, optimizer, flat=False, precision=Policy(model_dtype="bfloat16"))
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_what_does_not_fit_flat_memory_is_refused_when_it_is_made(accel):
    shared = torch.ones(6)
    with pytest.raises(UnsupportedError, match="share memory"):
        accel.optimizers.create("packed", [nn.Parameter(shared), nn.Parameter(shared[3:])], lr=0.1)
    assert accel.optimizers.create("sgd", [nn.Parameter(torch.ones(4, 6)[:, ::2])], lr=0.1).route != "packed"


def test_a_state_goes_to_torchs_class_with_a_count_for_each_parameter(accel):
    model = network()
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=0.1)
    trainer = accel.trainer(model, optimizer, flat=True)
    step(trainer)
    twin = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    twin.load_state_dict(optimizer.state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    twin.step()
    assert [entry["step"].item() for entry in twin.state.values()] == [2.0] * 4

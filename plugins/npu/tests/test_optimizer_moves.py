"""One formula and one state on every device: a run that moves between CPU and NPU, and steps that overflow."""

from __future__ import annotations

import copy

import pytest
import torch
from accelcore_npu.optimizers import FUSED
from fused_cases import OPTIONS, gradients, values
from torch import nn

import accelcore

MORE = {
    "adadelta": {"weight_decay": 0.1},
    "adam": {"amsgrad": True, "weight_decay": 0.1},
    "adamp": {"weight_decay": 0.1, "nesterov": True},
    "adamw": {"amsgrad": True},
    "bertadam": {"t_total": 12, "warmup": 0.5, "schedule": "warmup_cosine", "max_grad_norm": 1.0},
    "lamb": {"weight_decay": 0.1, "use_global_grad_norm": True},
    "rmsprop": {"momentum": 0.9, "centered": True},
    "rmsproptf": {"momentum": 0.9, "centered": True, "weight_decay": 0.1},
    "sgd": {"nesterov": True, "weight_decay": 0.1},
}
SHAPES = [(5, 3), (7,), (), (2, 3, 4), (30, 20)]

every_optimizer = pytest.mark.parametrize("name", list(FUSED))


def test_the_names_are_the_same_everywhere(accel):
    names = accel.optimizers.names()
    assert names == accelcore.select("cpu").optimizers.names()
    cuda = pytest.importorskip("accelcore_cuda.optimizers")
    assert names == cuda.create_optimizers(("adamw",)).names()


@every_optimizer
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch_npu copies a storage by an old API
def test_a_run_that_moves_between_devices_goes_the_same_way(accel, name):
    """By every route there is, three steps each, beside one that stays where it is."""
    cpu = accelcore.select("cpu")
    options = {**OPTIONS[name], **MORE[name]}

    def begin():
        generator = torch.Generator().manual_seed(1)
        return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]

    def train(backend, route, parameters, state, steps):
        parameters = [nn.Parameter(parameter.detach().to(backend.device)) for parameter in parameters]
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}]
        optimizer = backend.optimizers.create(name, groups, route=route, **options)
        if state is not None:
            optimizer.load_state_dict(state)
        for step in steps:
            gradients(parameters, seed=step)
            if step < 4:
                parameters[3].grad = None  # it comes late
            optimizer.step()
        return parameters, copy.deepcopy(optimizer.state_dict())

    def routes(backend):
        choices = backend.optimizers.explain(name, **options)
        # A route that cannot serve these options says why; one that was merely not chosen can be asked for.
        return [choice.route for choice in choices if choice.chosen or choice.reason.startswith("a better")]

    legs = [(accel, "npu_fused"), *((cpu, route) for route in routes(cpu))]
    legs = [leg for pair in zip(legs, [(accel, "npu_fused")] * len(legs), strict=True) for leg in pair]
    parameters, state = begin(), None
    for number, (backend, route) in enumerate(legs):
        parameters, state = train(backend, route, parameters, state, range(3 * number, 3 * number + 3))
    expected, reference = train(cpu, "formula", begin(), None, range(3 * len(legs)))
    torch.testing.assert_close(values(parameters), values(expected), rtol=3e-5, atol=3e-6)
    for number, entry in reference["state"].items():
        found = state["state"][number]
        assert found.keys() == entry.keys()
        torch.testing.assert_close(
            {key: tensor.cpu() for key, tensor in found.items()}, dict(entry), rtol=3e-5, atol=3e-6
        )

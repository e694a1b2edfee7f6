"""What torch_npu's fused optimizers do wrong, ours do right; test_torch_npu_facts.py shows theirs."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_npu
from accelcore_npu.optimizers import FUSED
from fused_cases import OPTIONS, gradients, same, values, weights

from accelcore.errors import UnsupportedError

every_optimizer = pytest.mark.parametrize("name", list(FUSED))


@pytest.fixture
def ours(accel):
    def make(name, parameters, **options):
        made = accel.optimizers.create(name, parameters, **{**OPTIONS[name], **options})
        assert made.route == "npu_fused"
        return made

    return make


@every_optimizer
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch_npu copies a storage by an old API
def test_a_state_loaded_after_a_step_counts(name, ours):
    def train(load):
        parameters = weights()
        optimizer = ours(name, parameters)
        for seed in range(3):
            gradients(parameters, seed)
            optimizer.step()
        start, state = values(parameters), copy.deepcopy(optimizer.state_dict())
        results = []
        for _ in range(2):
            with torch.no_grad():
                for parameter, value in zip(parameters, start, strict=True):
                    parameter.copy_(value)
            gradients(parameters, seed=10)
            optimizer.step()
            results.append(values(parameters))
            if load:
                optimizer.load_state_dict(state)
        return results

    assert same(*train(load=True))
    assert not same(*train(load=False)), "the state makes a difference"


def test_low_precision_is_left_to_others(accel):
    for dtype in (torch.bfloat16, torch.float16):
        parameters = weights(dtype=dtype)
        for name in FUSED:
            optimizer = accel.optimizers.create(name, parameters, **OPTIONS[name])
            assert optimizer.route != "npu_fused"
            with pytest.raises(UnsupportedError, match="moments are safe in float32 only"):
                accel.optimizers.create(name, parameters, route="npu_fused", **OPTIONS[name])
        assert accel.optimizers.create("lamb", parameters).route == "formula"


def test_bertadam_clips_each_group_by_the_groups_own_norm(accel):
    first, second = weights()
    groups = [{"params": [first]}, {"params": [second], "max_grad_norm": -1.0}]
    optimizer = accel.optimizers.create("bertadam", groups, lr=0.01)
    gradients([first, second], scale=100)
    unclipped = 0.1 * second.grad.cpu()
    optimizer.step()
    torch.testing.assert_close(optimizer.state[second]["exp_avg"].cpu(), unclipped)
    assert optimizer.state[first]["exp_avg"].norm().item() == pytest.approx(0.1, rel=1e-4)


def test_our_scaler_steps_torchs_fused_class(accel):
    (parameter,) = weights(1)
    before = values([parameter])[0]
    scaler = accel.scaler.create()
    scaler.scale((parameter * 2).sum()).backward()
    scaler.step(torch.optim.SGD([parameter], lr=0.5, fused=True))
    torch.testing.assert_close(values([parameter])[0], before - 1)


def test_torch_npus_scaler_unscales_the_gradients_that_our_optimizers_step_with(ours):
    parameters = weights()
    before = values(parameters)
    optimizer = ours("sgd", parameters, lr=0.5, momentum=0.0)
    scaler = torch_npu.npu.amp.GradScaler(init_scale=1024.0)
    scaler.scale(sum((2 * parameter).sum() for parameter in parameters)).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(values(parameters), [value - 1 for value in before])

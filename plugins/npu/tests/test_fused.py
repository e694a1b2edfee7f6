"""What torch_npu's fused optimizers do wrong, ours do right; test_torch_npu_facts.py shows theirs."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_npu
from accelcore_npu.optimizers import FUSED
from fused_cases import OPTIONS, gradients, same, values, weights
from torch import nn

from accelcore.errors import ConfigurationError, UnsupportedError

every_optimizer = pytest.mark.parametrize("name", list(FUSED))


@pytest.fixture
def ours(accel):
    def make(name, parameters, **options):
        made = accel.optimizers.create(name, parameters, **{**OPTIONS[name], **options})
        assert made.route == "npu_fused"
        return made

    return make


@every_optimizer
def test_a_first_gradient_that_comes_late_counts_as_a_first(name, ours):
    parameters, alone = weights(), weights()[1:]
    optimizer = ours(name, parameters)
    gradients(parameters[:1], seed=1)
    optimizer.step()
    before = values(parameters)[1]
    gradients(parameters, seed=2)
    optimizer.step()
    assert not torch.equal(before, values(parameters)[1])
    optimizer = ours(name, alone)
    gradients(weights(1) + alone, seed=2)
    optimizer.step()
    torch.testing.assert_close(parameters[1], alone[0], rtol=0, atol=0)


@every_optimizer
def test_gradients_that_were_set_to_none_and_made_anew_are_those_it_steps_with(name, ours):
    def train(second):
        parameters = weights()
        optimizer = ours(name, parameters)
        for seed in (1, second):
            gradients(parameters, seed)
            optimizer.step()
            optimizer.zero_grad()
            assert [parameter.grad for parameter in parameters] == [None, None]
        return values(parameters)

    assert not same(train(second=2), train(second=3))


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


def test_bertadam_resumes_within_its_schedule(ours):
    options = {"t_total": 10, "warmup": 0.5}

    def train(resume):
        parameters = weights()
        optimizer = ours("bertadam", parameters, **options)
        for seed in range(4):
            gradients(parameters, seed)
            optimizer.step()
        state = optimizer.state_dict()
        assert state["state"][0]["step"] == 4
        if resume:
            parameters = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
            optimizer = ours("bertadam", parameters, **options)
            optimizer.load_state_dict(state)
        gradients(parameters, 4)
        optimizer.step()
        return values(parameters)

    assert same(train(resume=True), train(resume=False))


def test_low_precision_is_left_to_others(accel):
    for dtype in (torch.bfloat16, torch.float16):
        parameters = weights(dtype=dtype)
        for name in FUSED:
            optimizer = accel.optimizers.create(name, parameters, **OPTIONS[name])
            assert optimizer.route != "npu_fused"
            with pytest.raises(UnsupportedError, match="moments are safe in float32 only"):
                accel.optimizers.create(name, parameters, route="npu_fused", **OPTIONS[name])
        assert accel.optimizers.create("lamb", parameters).route == "formula"


@every_optimizer
def test_the_strides_of_a_parameter_make_no_difference(name, ours):
    def train(transposed):
        dense = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1))
        parameters = [
            nn.Parameter((value.t().contiguous().t() if transposed else value).to("npu:0")) for value in dense
        ]
        assert parameters[0].is_contiguous() != transposed
        optimizer = ours(name, parameters, **({"weight_decay": 0.1} if name in ("adamp", "lamb") else {}))
        for seed in range(3):
            gradients(parameters, seed)
            optimizer.step()
        assert parameters[0].is_contiguous() != transposed
        return values(parameters)

    torch.testing.assert_close(train(transposed=True), train(transposed=False), rtol=1e-6, atol=1e-6)


@every_optimizer
def test_a_closure_is_stepped_with_what_it_computed(name, ours):
    parameters = weights()
    optimizer = ours(name, parameters)

    def closure():
        optimizer.zero_grad()
        loss = sum((parameter**2).sum() for parameter in parameters)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_lamb_by_the_global_norm_of_the_gradients(ours):
    found = []
    for options in ({"use_global_grad_norm": True}, {}):
        parameters = weights()
        gradients(parameters, scale=100)
        if not options:
            norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
            for parameter in parameters:
                parameter.grad /= norm
        optimizer = ours("lamb", parameters, **options)
        optimizer.step()
        found.append(optimizer.state[parameters[0]]["exp_avg"].cpu())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("schedule", ["warmup_cosine", "warmup_poly"])
def test_bertadams_rate_is_0_after_the_end_of_its_schedule(ours, schedule):
    parameters = weights()
    optimizer = ours("bertadam", parameters, schedule=schedule, t_total=10, warmup=0.1)
    for _ in range(12):
        gradients(parameters)
        optimizer.step()
    after_the_end = values(parameters)
    assert all(value.isfinite().all() for value in after_the_end)
    gradients(parameters)
    optimizer.step()
    assert same(after_the_end, values(parameters))


def test_bertadam_clips_each_group_by_the_groups_own_norm(accel):
    first, second = weights()
    groups = [{"params": [first]}, {"params": [second], "max_grad_norm": -1.0}]
    optimizer = accel.optimizers.create("bertadam", groups, lr=0.01)
    gradients([first, second], scale=100)
    unclipped = 0.1 * second.grad.cpu()
    optimizer.step()
    torch.testing.assert_close(optimizer.state[second]["exp_avg"].cpu(), unclipped)
    assert optimizer.state[first]["exp_avg"].norm().item() == pytest.approx(0.1, rel=1e-4)


@every_optimizer
def test_an_invalid_learning_rate_is_refused(name, accel):
    for lr in (float("nan"), -1.0):
        with pytest.raises(ConfigurationError):
            accel.optimizers.create(name, weights(), lr=lr)


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

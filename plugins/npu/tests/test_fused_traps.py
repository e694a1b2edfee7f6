"""Traps of torch_npu's fused optimizers. Each test shows the bare class falling into one, and ours passing by."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_npu
from torch import nn

from accelcore.errors import ConfigurationError, UnsupportedError

pytestmark = [
    # torch_npu's own, of its bare classes: an old API of storages, and add_(number, tensor).
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:This overload of add:UserWarning"),
]

OPTIONS = {
    "adadelta": {"lr": 0.5},
    "adam": {"lr": 0.01},
    "adamp": {"lr": 0.01},
    "adamw": {"lr": 0.01},
    "bertadam": {"lr": 0.01, "max_grad_norm": -1.0},
    "lamb": {"lr": 0.01},
    "rmsprop": {"lr": 0.01},
    "rmsproptf": {"lr": 0.01},
    "sgd": {"lr": 0.01, "momentum": 0.9},
}
BARE = {
    "adadelta": torch_npu.optim.NpuFusedAdadelta,
    "adam": torch_npu.optim.NpuFusedAdam,
    "adamp": torch_npu.optim.NpuFusedAdamP,
    "adamw": torch_npu.optim.NpuFusedAdamW,
    "bertadam": torch_npu.optim.NpuFusedBertAdam,
    "lamb": torch_npu.optim.NpuFusedLamb,
    "rmsprop": torch_npu.optim.NpuFusedRMSprop,
    "rmsproptf": torch_npu.optim.NpuFusedRMSpropTF,
    "sgd": torch_npu.optim.NpuFusedSGD,
}
every_optimizer = pytest.mark.parametrize("name", list(BARE))


@pytest.fixture
def weights(accel):
    """Makes parameters that are equal each time it is called."""

    def make(count=2, dtype=torch.float32):
        generator = torch.Generator().manual_seed(1)
        return [nn.Parameter(torch.randn(3, 4, generator=generator).to(accel.device, dtype)) for _ in range(count)]

    return make


@pytest.fixture
def ours(accel):
    def make(name, parameters, **options):
        made = accel.optimizers.create(name, parameters, **{**OPTIONS[name], **options})
        chosen = next(choice.route for choice in accel.optimizers.explain(name, **options) if choice.chosen)
        assert chosen == "npu_fused"
        return made

    return make


def bare(name, parameters, **options):
    return BARE[name](parameters, **{**OPTIONS[name], **options})


def gradients(parameters, seed=0, scale=1.0, in_place=False):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        gradient = scale * torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
        if in_place and parameter.grad is not None:
            parameter.grad.copy_(gradient)
        else:
            parameter.grad = gradient


def values(parameters):
    return [parameter.detach().cpu().clone() for parameter in parameters]


def same(first, second):
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@every_optimizer
def test_a_first_gradient_that_comes_late(name, weights, ours):
    def train(optimizer, parameters):
        gradients(parameters[:1], seed=1)
        optimizer.step()
        gradients(parameters, seed=2)
        before = values(parameters)[1]
        optimizer.step()
        return not torch.equal(before, values(parameters)[1])

    parameters = weights()
    optimizer = bare(name, parameters)
    if name in ("sgd", "bertadam"):
        assert not train(optimizer, parameters), "the bare class leaves the late parameter as it is"
    else:
        with pytest.raises(KeyError, match="step"):
            train(optimizer, parameters)

    parameters = weights()
    assert train(ours(name, parameters), parameters)
    alone = weights()[1:]
    optimizer = ours(name, alone)
    gradients(weights(1) + alone, seed=2)
    optimizer.step()
    torch.testing.assert_close(parameters[1], alone[0], rtol=0, atol=0)


@every_optimizer
def test_gradients_that_were_set_to_none_and_made_anew(name, weights, ours):
    def train(optimizer, parameters, second):
        gradients(parameters, seed=1)
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        gradients(parameters, seed=second)
        optimizer.step()
        return values(parameters)

    trained = [train(bare(name, parameters), parameters, second) for second in (2, 3) for parameters in [weights()]]
    if name != "adamp":  # it reads the new gradient, too, beside the stale one
        assert same(*trained), "the bare class steps with the gradients of the first step"
    trained = [train(ours(name, parameters), parameters, second) for second in (2, 3) for parameters in [weights()]]
    assert not same(*trained)


@every_optimizer
def test_zero_grad_sets_to_none_as_everywhere(name, weights, ours):
    parameters = weights()
    with pytest.raises(ValueError, match="set_to_none is not supported"):
        bare(name, parameters).zero_grad(set_to_none=True)

    optimizer = ours(name, parameters)
    for arguments in ({}, {"set_to_none": True}):
        gradients(parameters)
        optimizer.zero_grad(**arguments)
        assert [parameter.grad for parameter in parameters] == [None, None]
    gradients(parameters)
    optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad.eq(0).all() for parameter in parameters)


@every_optimizer
def test_a_state_loaded_after_a_step_counts(name, weights, ours):
    def train(optimizer, parameters, load):
        for seed in range(3):
            gradients(parameters, seed, in_place=True)
            optimizer.step()
        start, state = values(parameters), copy.deepcopy(optimizer.state_dict())
        gradients(parameters, seed=10, in_place=True)
        optimizer.step()
        result = values(parameters)
        # Back to where the state was taken, and the same step again.
        with torch.no_grad():
            for parameter, value in zip(parameters, start, strict=True):
                parameter.copy_(value)
        if load:
            optimizer.load_state_dict(state)
        gradients(parameters, seed=10, in_place=True)
        optimizer.step()
        return result, values(parameters)

    parameters = weights()
    assert not same(*train(bare(name, parameters), parameters, load=True)), "the bare class keeps the state it had"
    parameters = weights()
    assert same(*train(ours(name, parameters), parameters, load=True))
    parameters = weights()
    assert not same(*train(ours(name, parameters), parameters, load=False)), "the state makes a difference"


def test_bertadam_counts_its_steps_in_its_state_so_that_a_resume_goes_on_with_the_schedule(weights, ours):
    options = {"t_total": 10, "warmup": 0.5}

    def train(make, resume):
        parameters = weights()
        optimizer = make("bertadam", parameters, **options)
        for seed in range(4):
            gradients(parameters, seed)
            optimizer.step()
        state = optimizer.state_dict()
        if resume:
            parameters = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
            optimizer = make("bertadam", parameters, **options)
            optimizer.load_state_dict(state)
        gradients(parameters, 4)
        optimizer.step()
        return [state["state"][0]["step"], values(parameters)]

    fresh = {"step": 0}
    assert train(bare, resume=False)[0] == fresh["step"], "the bare class's state still says 0 after four steps"

    step, resumed = train(ours, resume=True)
    assert step == 4
    assert same(resumed, train(ours, resume=False)[1])


def test_bf16_parameters(accel, weights):
    parameters = weights(dtype=torch.bfloat16)
    gradients(parameters)
    with pytest.raises(TypeError, match="must be either float32 or float16"):
        bare("adam", parameters).step()

    optimizer = accel.optimizers.create("adam", parameters, lr=0.01)
    assert type(optimizer) is torch.optim.Adam
    before = values(parameters)
    optimizer.step()
    assert not same(before, values(parameters))
    with pytest.raises(UnsupportedError, match="moments are safe in float32 only"):
        accel.optimizers.create("lamb", parameters)


def test_fp16_moments(accel, weights):
    parameters = weights(dtype=torch.float16)
    gradients(parameters, scale=1e-5)
    bare("adam", parameters).step()
    assert not all(value.isfinite().all() for value in values(parameters)), "eps=1e-8 is 0 in fp16"

    with pytest.raises(UnsupportedError, match="moments are safe in float32 only"):
        accel.optimizers.create("adam", parameters, route="npu_fused")


def test_parameters_that_are_not_contiguous(accel):
    def make():
        return [nn.Parameter(torch.ones(4, 3, device=accel.device).t())]

    parameters = make()
    gradients(parameters)
    with pytest.raises(RuntimeError, match="must be contiguous"):
        bare("adam", parameters).step()

    parameters = make()
    gradients(parameters)
    optimizer = accel.optimizers.create("adam", parameters, lr=0.01)
    assert type(optimizer) is torch.optim.Adam
    optimizer.step()
    torch.testing.assert_close(parameters[0].detach().cpu(), 1 - 0.01 * parameters[0].grad.cpu().sign())


@every_optimizer
def test_a_step_with_a_closure(name, weights, ours):
    def train(optimizer, parameters):
        def closure():
            optimizer.zero_grad()
            loss = sum((parameter**2).sum() for parameter in parameters)
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(5)]

    parameters = weights()
    optimizer = bare(name, parameters)
    if name in ("adamp", "lamb"):
        with pytest.raises(KeyError, match="step"):
            train(optimizer, parameters)
    else:
        with pytest.raises(RuntimeError, match="does not require grad"):
            train(optimizer, parameters)

    parameters = weights()
    losses = train(ours(name, parameters), parameters)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_lamb_by_the_global_norm_of_the_gradients(weights, ours):
    parameters = weights()
    gradients(parameters)
    with pytest.raises(AttributeError, match="get_optimizer_combined_grads"):
        bare("lamb", parameters, use_global_grad_norm=True).step()

    steps = []
    for scale, options in ((1.0, {"use_global_grad_norm": True}), (1.0, {})):
        parameters = weights()
        gradients(parameters, scale=100 * scale)
        if not options:
            norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
            for parameter in parameters:
                parameter.grad /= norm
        optimizer = ours("lamb", parameters, **options)
        optimizer.step()
        steps.append(optimizer.state[parameters[0]]["exp_avg"].cpu())
    torch.testing.assert_close(*steps)


def test_bertadam_with_a_cosine_schedule(weights, ours):
    options = {"schedule": "warmup_cosine", "t_total": 10, "warmup": 0.1}
    parameters = weights()
    optimizer = bare("bertadam", parameters, **options)
    gradients(parameters)
    optimizer.step()
    with pytest.raises(TypeError, match="cos"):
        optimizer.step()

    parameters = weights()
    optimizer = ours("bertadam", parameters, **options)
    for _ in range(12):
        gradients(parameters)
        optimizer.step()
    after_the_end = values(parameters)
    gradients(parameters)
    optimizer.step()
    assert same(after_the_end, values(parameters)), "the rate is 0 from t_total on"


def test_bertadam_with_a_polynomial_schedule_after_its_end(weights, ours):
    options = {"schedule": "warmup_poly", "t_total": 2, "warmup": 0.1}

    def train(optimizer, parameters):
        for _ in range(4):
            gradients(parameters)
            optimizer.step()
        return values(parameters)

    parameters = weights()
    with pytest.raises(RuntimeError, match="omplex"):
        train(bare("bertadam", parameters, **options), parameters)

    parameters = weights()
    assert all(value.isfinite().all() for value in train(ours("bertadam", parameters, **options), parameters))


def test_bertadam_clips_each_group_by_the_groups_own_norm(accel, weights):
    def train(make):
        first, second = weights()
        optimizer = make([{"params": [first]}, {"params": [second], "max_grad_norm": -1.0}])
        gradients([first, second], scale=100)
        wanted = second.grad.cpu()
        optimizer.step()
        return torch.allclose(optimizer.state[second]["exp_avg"].cpu(), 0.1 * wanted)

    assert not train(lambda groups: BARE["bertadam"](groups, lr=0.01)), "the bare class clips the second group, too"
    assert train(lambda groups: accel.optimizers.create("bertadam", groups, lr=0.01))


@every_optimizer
def test_a_learning_rate_that_is_not_a_number(name, accel, weights):
    bare(name, weights(), lr=float("nan"))
    with pytest.raises(ConfigurationError):
        accel.optimizers.create(name, weights(), lr=float("nan"))


def test_adamp_with_a_negative_learning_rate(accel, weights):
    bare("adamp", weights(), lr=-1.0)
    with pytest.raises(ConfigurationError, match="lr=-1"):
        accel.optimizers.create("adamp", weights(), lr=-1.0)


def test_torch_npus_scaler_hands_itself_to_a_fused_step_and_ours_does_not(accel, weights):
    def train(scaler, optimizer, parameter):
        scaler.scale((parameter * 2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    (parameter,) = weights(1)
    with pytest.raises(TypeError, match="grad_scaler"):
        train(torch_npu.npu.amp.GradScaler(), torch.optim.SGD([parameter], lr=0.5, fused=True), parameter)

    (parameter,) = weights(1)
    before = values([parameter])[0]
    train(accel.scaler.create(), torch.optim.SGD([parameter], lr=0.5, fused=True), parameter)
    torch.testing.assert_close(values([parameter])[0], before - 1)


def test_torch_npus_scaler_unscales_the_gradients_that_our_optimizers_step_with(weights, ours):
    parameters = weights()
    before = values(parameters)
    optimizer = ours("sgd", parameters, lr=0.5, momentum=0.0)
    scaler = torch_npu.npu.amp.GradScaler(init_scale=1024.0)
    scaler.scale(sum((2 * parameter).sum() for parameter in parameters)).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(values(parameters), [value - 1 for value in before])

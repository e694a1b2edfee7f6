"""Facts about torch_npu 2.13's own fused optimizers and scaler, which ours are built around.

They say nothing of accelcore. Where one fails under a newer torch_npu, what ours does about it may be needless there.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch_npu
from fused_cases import OPTIONS, gradients, same, values, weights
from torch import nn

pytestmark = [
    pytest.mark.skipif(not torch_npu.__version__.startswith("2.13."), reason="these are facts about torch_npu 2.13"),
    pytest.mark.usefixtures("accel"),
    # An old API of storages, and add_(number, tensor).
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:This overload of add:UserWarning"),
]

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


def bare(name, parameters, **options):
    return BARE[name](parameters, **{**OPTIONS[name], **options})


@every_optimizer
def test_a_first_gradient_that_comes_late_is_not_seen(name):
    parameters = weights()
    optimizer = bare(name, parameters)
    gradients(parameters[:1], seed=1)
    optimizer.step()
    gradients(parameters, seed=2)
    before = values(parameters)[1]
    if name in ("sgd", "bertadam"):
        optimizer.step()
        assert torch.equal(before, values(parameters)[1])
    else:
        with pytest.raises(KeyError, match="step"):
            optimizer.step()


@pytest.mark.parametrize("name", sorted(BARE.keys() - {"adamp"}))  # which reads the new gradient, too
def test_gradients_that_were_made_anew_are_not_seen(name):
    def train(second):
        parameters = weights()
        optimizer = bare(name, parameters)
        for seed in (1, second):
            gradients(parameters, seed)
            optimizer.step()
        return values(parameters)

    assert same(train(second=2), train(second=3))


def test_zero_grad_refuses_to_set_to_none():
    with pytest.raises(ValueError, match="set_to_none is not supported"):
        bare("adam", weights()).zero_grad(set_to_none=True)


@every_optimizer
def test_a_state_loaded_after_a_step_is_not_seen(name):
    parameters = weights()
    optimizer = bare(name, parameters)
    for seed in range(3):
        gradients(parameters, seed, in_place=True)
        optimizer.step()
    start, state = values(parameters), copy.deepcopy(optimizer.state_dict())
    results = []
    for _ in range(2):
        with torch.no_grad():
            for parameter, value in zip(parameters, start, strict=True):
                parameter.copy_(value)
        gradients(parameters, seed=10, in_place=True)
        optimizer.step()
        results.append(values(parameters))
        optimizer.load_state_dict(state)
    assert not same(*results)


def test_bertadam_does_not_count_its_steps_in_its_state():
    parameters = weights()
    optimizer = bare("bertadam", parameters)
    for seed in range(4):
        gradients(parameters, seed)
        optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 0


def test_bf16_is_refused_and_fp16_moments_lose_their_eps():
    parameters = weights(dtype=torch.bfloat16)
    gradients(parameters)
    with pytest.raises(TypeError, match="must be either float32 or float16"):
        bare("adam", parameters).step()
    parameters = weights(dtype=torch.float16)
    gradients(parameters, scale=1e-5)
    bare("adam", parameters).step()
    assert not all(value.isfinite().all() for value in values(parameters)), "eps=1e-8 is 0 in fp16"


def test_parameters_have_to_be_contiguous():
    parameters = [nn.Parameter(torch.ones(4, 3, device="npu:0").t())]
    gradients(parameters)
    with pytest.raises(RuntimeError, match="must be contiguous"):
        bare("adam", parameters).step()


@every_optimizer
def test_a_closure_fails(name):
    parameters = weights()
    optimizer = bare(name, parameters)

    def closure():
        optimizer.zero_grad()
        loss = sum((parameter**2).sum() for parameter in parameters)
        loss.backward()
        return loss

    def twice():
        optimizer.step(closure)
        optimizer.step(closure)

    early = name in ("adamp", "lamb")
    with pytest.raises(KeyError if early else RuntimeError, match="step" if early else "does not require grad"):
        twice()


def test_lamb_fails_by_the_global_norm_of_the_gradients():
    parameters = weights()
    gradients(parameters)
    with pytest.raises(AttributeError, match="get_optimizer_combined_grads"):
        bare("lamb", parameters, use_global_grad_norm=True).step()


@pytest.mark.parametrize(
    ("schedule", "t_total", "error", "message"),
    [("warmup_cosine", 10, TypeError, "cos"), ("warmup_poly", 2, RuntimeError, "omplex")],
)
def test_bertadams_schedules_fail(schedule, t_total, error, message):
    parameters = weights()
    optimizer = bare("bertadam", parameters, schedule=schedule, t_total=t_total, warmup=0.1)

    def train():
        for _ in range(4):
            gradients(parameters)
            optimizer.step()

    with pytest.raises(error, match=message):
        train()


def test_bertadam_clips_every_group_by_the_norm_of_the_first():
    first, second = weights()
    optimizer = BARE["bertadam"]([{"params": [first]}, {"params": [second], "max_grad_norm": -1.0}], lr=0.01)
    gradients([first, second], scale=100)
    unclipped = 0.1 * second.grad.cpu()
    optimizer.step()
    assert not torch.allclose(optimizer.state[second]["exp_avg"].cpu(), unclipped)


def test_invalid_learning_rates_are_taken():
    for name in BARE:
        bare(name, weights(), lr=float("nan"))
    bare("adamp", weights(), lr=-1.0)


def test_the_scaler_hands_itself_to_a_fused_step_of_torchs():
    (parameter,) = weights(1)
    scaler = torch_npu.npu.amp.GradScaler()
    scaler.scale((parameter * 2).sum()).backward()
    with pytest.raises(TypeError, match="grad_scaler"):
        scaler.step(torch.optim.SGD([parameter], lr=0.5, fused=True))

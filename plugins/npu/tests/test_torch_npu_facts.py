"""Facts about torch_npu 2.13's own fused optimizers and scaler, which ours are built around.

They say nothing of accelcore. Where one fails under a newer torch_npu, what ours does about it may be needless there.
What is wrong without an error is in the table of known faults (test_known_faults.py).
"""

from __future__ import annotations

import pytest
import torch
import torch_npu
from fused_cases import OPTIONS, VENDORS, gradients, values, weights
from torch import nn

pytestmark = [
    pytest.mark.skipif(not torch_npu.__version__.startswith("2.13."), reason="these are facts about torch_npu 2.13"),
    pytest.mark.usefixtures("accel"),
    # An old API of storages, and add_(number, tensor).
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:This overload of add:UserWarning"),
]

every_optimizer = pytest.mark.parametrize("name", list(VENDORS))


def bare(name, parameters, **options):
    return VENDORS[name](parameters, **{**OPTIONS[name], **options})


def test_zero_grad_refuses_to_set_to_none():
    with pytest.raises(ValueError, match="set_to_none is not supported"):
        bare("adam", weights()).zero_grad(set_to_none=True)


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


def test_invalid_learning_rates_are_taken():
    for name in VENDORS:
        bare(name, weights(), lr=float("nan"))
    bare("adamp", weights(), lr=-1.0)


def test_the_scaler_hands_itself_to_a_fused_step_of_torchs():
    (parameter,) = weights(1)
    scaler = torch_npu.npu.amp.GradScaler()
    scaler.scale((parameter * 2).sum()).backward()
    with pytest.raises(TypeError, match="grad_scaler"):
        scaler.step(torch.optim.SGD([parameter], lr=0.5, fused=True))

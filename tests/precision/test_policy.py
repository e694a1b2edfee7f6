"""Precision policies: what is none is refused with what there is, and small gradients survive their scale."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

import accelcore
from accelcore.precision.policy import Policy, PrecisionWord, preset_name


@pytest.mark.parametrize(
    "options",
    [
        {"autocast": "bf17"},
        {"autocast": "float99"},
        {"autocast": "nn"},
        {"autocast": 8},
        {"model_dtype": "half precision"},
        {"model_dtype": torch.int8},
        {"loss_scale": "static"},
        {"loss_scale": 0},
        {"loss_scale": -2.0},
        {"loss_scale": float("inf")},
        {"loss_scale": float("nan")},
        {"loss_scale": True},
        {"table": "O1"},
        {"table": "O9", "autocast": "float16"},
        {"table": 1, "autocast": "float16"},
        {"masters": "no"},
        {"keep_batchnorm_fp32": "x", "model_dtype": "float16"},
        {"cast_boundary": 1, "model_dtype": "float16"},
    ],
    ids=str,
)
def test_what_is_no_policy_is_refused_when_it_is_made(options):
    with pytest.raises(accelcore.ConfigurationError, match=next(iter(options))):
        Policy(**options)


@pytest.mark.parametrize("word", ["bf16", "bf16-mixed", torch.bfloat16, "torch.bfloat16"])
def test_other_words_for_a_dtype_mean_the_same(word):
    assert Policy(autocast=word) == Policy(autocast="bfloat16")
    assert Policy(model_dtype=word).model_dtype == "bfloat16"


@pytest.mark.parametrize("loss_scale", [1024.0, "dynamic"])
def test_small_fp16_gradients_are_divided_by_their_scale_in_fp32_or_not_at_all(accel, loss_scale):
    """3e-6 / 1024 is 0 in fp16: masters get it in fp32, and without them the step is refused."""

    def made(masters):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        return accel.trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=1e6),
            loss=lambda m, x: m(x).float().sum() * 3e-9,
            precision=Policy(model_dtype="float16", loss_scale=loss_scale, masters=masters),
        )

    if "float16" not in accel.capabilities.model_dtypes:
        pytest.skip("this device holds no parameters in fp16")
    x = torch.ones(1, 1, dtype=torch.float16)
    trainer = made(masters=True)
    scale = trainer.scaler.state_dict()["scale"]
    trainer(x)
    gradient = torch.tensor(3e-9 * scale).half().double() / scale
    torch.testing.assert_close(trainer.model.weight.double(), (1 - 1e6 * gradient).view(1, 1), rtol=1e-3, atol=0)
    assert trainer.model.weight != 1
    with pytest.raises(accelcore.ConfigurationError, match="fp16 gradients"):
        made(masters=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"init": True}, {"init": "1"}, {"min": None}, {"max": "2"}, {"growth": True}, {"backoff": "0.5"},
        {"interval": "9"}, {"interval": 2.5}, {"interval": True}, {"interval": 0}, {"growth": 1.0}, {"backoff": 1.0},
        {"min": 5.0, "max": 1.0}, {"max": float("inf")}, {"init": float("nan")},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_no_loss_scale_can_work_with_are_refused(settings):
    with pytest.raises(accelcore.ConfigurationError, match=f"{next(iter(settings))}="):
        accelcore.LossScale(**settings)


@pytest.mark.parametrize("init", [0, -8.0, float("inf"), float("nan"), "8", True], ids=repr)
def test_what_is_no_static_loss_scale_is_refused(accel, init):
    with pytest.raises(accelcore.ConfigurationError, match=f"{init!r} is not a static"):
        accel.scaler.create(init=init, dynamic=False)


def test_the_words_that_a_type_checker_takes_are_those_that_a_trainer_takes():
    def fits(word):
        try:
            return bool(preset_name(word, lambda: None))
        except accelcore.ConfigurationError:
            return False

    words = get_args(PrecisionWord)
    assert all(map(fits, words))
    with pytest.raises(accelcore.ConfigurationError) as error:
        preset_name("nothing", lambda: None)
    assert set(error.value.available.split(", ")) <= set(words)

"""A run moves between precisions: saved in one, it goes on in any other, and the model's file is fp32 in all."""

from __future__ import annotations

import copy
import logging
import re

import pytest
import torch
from safetensors.torch import load_file
from thinned import diagonals
from torch import nn
from torch.nn.functional import mse_loss

import accelcore
from accelcore import Policy

PRECISIONS = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "O0": "O0",
    "O1": "O1",
    "O2": "O2",
    "O3": "O3",
    "O2 in bf16": Policy.preset("O2", dtype="bfloat16"),
    "O2, 128": Policy(model_dtype="float16", keep_batchnorm_fp32=True, cast_boundary=True, loss_scale=128.0),
}
ROUNDING = {name: 2**-7 if "bf16" in name else 2**-10 for name in PRECISIONS} | {"fp32": 1e-6, "O0": 1e-6}
LOW = ("O2", "O3", "O2 in bf16", "O2, 128")


class Tied(nn.Module):
    """A model with BatchNorm, and a weight under two names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.last = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.last(self.norm(self.first(x)).relu()))


def data(seed):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1, keepdim=True)


def train(trainer, seeds, losses=1):
    found = []
    for seed in seeds:
        x, y = data(seed)
        with trainer.autocast():
            output = trainer.forward(x)
            parts = [mse_loss(output, y), output.square().mean() * 1e-3][:losses]
        for part in parts:
            trainer.backward(part, retain_graph=part is not parts[-1])
        trainer.update()
        found.append(parts[0].item())
    return found


def make(accel, precision, flat=None):
    model = Tied()
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=1e-2, eps=1e-4)
    return accel.trainer(model, optimizer, precision=PRECISIONS[precision], flat=flat)


def outputs(trainer):
    trainer.model.eval()
    with torch.no_grad(), trainer.autocast():
        return trainer.forward(data(99)[0]).double()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of each precision, what its model said, and the largest weight it has."""
    made = {}
    for losses in (1, 2):
        for name in PRECISIONS:
            folder = tmp_path_factory.mktemp("saved")
            trainer = make(accelcore.select("cpu"), name)
            train(trainer, range(12), losses)
            state = copy.deepcopy(trainer.model.state_dict())
            path = trainer.save(folder)
            made[name, losses] = path, outputs(trainer), state
    return made


@pytest.mark.parametrize(("before", "after"), diagonals(PRECISIONS, PRECISIONS, count=2))
def test_from_every_precision_to_every_other(accel, saved, before, after, caplog):
    for losses, flat in ((1, True), (2, False)):
        path, expected, _ = saved[before, losses]
        trainer = make(accel, after, flat=flat)
        caplog.clear()
        trainer.resume(path)
        off = (outputs(trainer) - expected).abs().max() / expected.abs().max()
        assert off < 8 * max(ROUNDING[before], ROUNDING[after])
        said = [record.message for record in caplog.records if "resumed from" not in record.message]
        assert len(said) <= 2, "one line for what is dropped, and one for what is rounded"
        assert before != after or not said
        trainer.model.train()
        assert trainer.steps == 12
        went_on = train(trainer, range(12, 24), losses)
        assert sum(went_on[-3:]) < sum(went_on[:3]), "it does not go on learning"


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_models_file_and_state_dict_are_fp32_and_what_any_tool_can_load(saved, name):
    path, expected, state = saved[name, 1]
    model = Tied()
    plain = {key: value.dtype for key, value in model.state_dict().items()}
    of_file = load_file(path / "model.safetensors")
    assert {key: value.dtype for key, value in state.items()} == plain
    assert {value.dtype for key, value in of_file.items() if "tracked" not in key} == {torch.float32}
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        off = (model(data(99)[0]).double() - expected).abs().max() / expected.abs().max()
    assert off < 8 * ROUNDING[name]
    for key, value in of_file.items():
        torch.testing.assert_close(state[key].float(), value.float(), rtol=ROUNDING[name], atol=0)
    if name in ("O2", "O2 in bf16"):
        assert not torch.equal(of_file["head.weight"], state["head.weight"]), "the file has the masters' values"


def test_masters_are_in_the_models_file_and_not_a_second_time(accel, saved, tmp_path):
    sizes = {name: sum(file.stat().st_size for file in saved[name, 1][0].iterdir()) for name in ("O0", "O2")}
    assert abs(sizes["O2"] - sizes["O0"]) < 600, "beside the scaler's state and other random numbers"


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("O2", "O2, 128", r"a dynamic loss scale of \d+\.0, and this training a static loss scale of 128\.0"),
        ("O2, 128", "O2", r"a static loss scale of 128\.0, and this training a dynamic loss scale of 65536\.0"),
        ("O1", "bf16", r"a dynamic loss scale of \d+\.0, and this training no loss scale"),
        ("O0", "O3", "no fp32 masters"),
    ],
)
def test_what_is_dropped_is_said_in_one_line(accel, saved, before, after, says, caplog):
    with caplog.at_level(logging.WARNING, "accelcore"):
        trainer = make(accel, after)
        caplog.clear()
        trainer.resume(saved[before, 1][0])
    (line,) = (record.message for record in caplog.records if "resumed from" not in record.message)
    assert re.search(says, line)


def test_a_state_dict_that_says_something_else_of_a_parameter_is_left_to_it(accel, tmp_path):
    """A module that merges, transposes or leaves out has its own word on its state; masters are saved beside it."""

    class Negative(nn.Linear):
        def __init__(self):
            super().__init__(2, 2, bias=False)
            self.register_state_dict_post_hook(
                lambda module, state, prefix, metadata: state.update(weight=-state["weight"])
            )
            self.register_load_state_dict_pre_hook(
                lambda module, state, prefix, *others: state.update(weight=-state["weight"])
            )

    def trainer():
        torch.manual_seed(0)
        model = Negative()
        return accel.trainer(
            model, torch.optim.SGD(model.parameters(), lr=1e-5), loss=lambda m, x: m(x).sum(), precision="O2"
        )

    first, second = trainer(), trainer()
    for _ in range(40):
        first(torch.ones(1, 2))
    first.save(tmp_path)
    expected = [first(torch.ones(1, 2)).item() for _ in range(300)]
    second.resume(tmp_path)
    assert [second(torch.ones(1, 2)).item() for _ in range(300)] == expected
    assert expected[0] != expected[-1]

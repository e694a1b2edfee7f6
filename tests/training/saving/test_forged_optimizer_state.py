"""State that an optimizer could not go on from is refused before anything changes; what it keeps itself never is."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from thinned import diagonals
from torch import nn

import accelcore
from tests.training.saving.test_resume_all_or_nothing import forge

OPTIONS = {
    "adam": {"amsgrad": True}, "adamw": {}, "sgd": {"momentum": 0.9}, "rmsprop": {"momentum": 0.9, "centered": True},
    "nadam": {}, "radam": {}, "adamax": {}, "asgd": {}, "rprop": {}, "adagrad": {}, "adadelta": {}, "adafactor": {},
    **({"muon": {}} if hasattr(torch.optim, "Muon") else {}),  # older torch lacks it
}  # fmt: skip
CLASSES = {name.lower(): kind for name, kind in vars(torch.optim).items() if name.lower() in OPTIONS}
OF_THE_WHOLE = {"step", "mu", "eta", "mu_product"}


class Projected(torch.optim.Optimizer):
    """Of one's own: its state has shapes that only it knows, and lists."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state.update(exp_avg=torch.zeros(2), bases=[torch.eye(size) for size in parameter.shape], rank=1)
            state["exp_avg"] += parameter.grad.sum()
            parameter -= 0.1 * parameter.grad * (1 + state["exp_avg"][0])


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6, bias=False, dtype=dtype), nn.Linear(6, 2, bias=False, dtype=dtype))


def make(accel, name, whose, dtype=torch.float32):
    model = model_of(dtype)
    if name == "projected":
        optimizer = Projected(model.parameters())
    elif whose == "ours":
        optimizer = accel.optimizers.create(name, model.parameters(), **OPTIONS[name])
    else:
        optimizer = CLASSES[name](model.parameters(), **OPTIONS[name])
    return accel.trainer(model, optimizer, loss=lambda m, b: m(b).abs().square().mean())


def train(trainer, steps):
    dtype = next(trainer.model.parameters()).dtype
    return [float(trainer(torch.full((3, 4), 0.5 + n, dtype=dtype))) for n in range(steps)]


def wrong(key, value, shape, strict):
    """Values that cannot replace a tensor of the state; `strict`: a fused kernel relies on its being one."""
    if key == "step":
        yield from ("rubbish", -1, math.nan, torch.zeros(2))
    elif key in OF_THE_WHOLE:
        yield from (torch.zeros(2), torch.zeros(shape))
    else:
        yield from (torch.zeros(1), torch.zeros(5), torch.zeros(shape[::-1]), torch.zeros(value.shape).int())
        if strict:
            yield from ("rubbish", 0.0, torch.zeros(()))


@pytest.mark.parametrize(("name", "whose"), diagonals(OPTIONS, ["ours", "torch's"]))
def test_each_tensor_of_the_state_is_looked_at(accel, tmp_path, name, whose):
    trainer = make(accel, name, whose)
    train(trainer, 2)
    path = trainer.save(tmp_path / "whole")
    other = make(accel, name, whose)
    train(other, 1)
    before = copy.deepcopy(other.model.state_dict())
    entry = trainer.optimizer.state_dict()["state"][0]
    assert entry
    strict = whose == "ours" and trainer.optimizer.keeps_shapes
    keys = {"step"} if name == "adafactor" else entry  # its state has other shapes
    forgeries = [(key, value) for key in keys for value in wrong(key, entry[key], (6, 4), strict)]
    for number, (key, value) in enumerate(forgeries):
        folder = tmp_path / str(number)
        forge(path, folder, lambda parts: parts["shared"]["optimizer"]["state"]["0.weight"].update({key: value}))  # noqa: B023
        with pytest.raises(accelcore.CheckpointError, match=key if key != "step" else "updated"):
            other.resume(folder)
        assert all(torch.equal(other.model.state_dict()[part], tensor) for part, tensor in before.items())
    for lacking in () if name == "adafactor" else entry:
        folder = tmp_path / f"lacks {lacking}"
        forge(path, folder, lambda parts: parts["shared"]["optimizer"]["state"]["0.weight"].pop(lacking))  # noqa: B023
        with pytest.raises(accelcore.CheckpointError, match=rf"0\.weight lacks {lacking}"):
            other.resume(folder)
    other.resume(path)
    assert train(other, 3) == train(trainer, 3)


@pytest.mark.parametrize(("name", "dtype"), [("projected", torch.float32), ("adamw", torch.complex64)])
@pytest.mark.parametrize("whose", ["ours", "torch's"])
def test_what_an_optimizer_keeps_is_taken(accel, tmp_path, name, dtype, whose):
    trainer, other = make(accel, name, whose, dtype), make(accel, name, whose, dtype)
    train(trainer, 2)
    trainer.save(tmp_path)
    other.resume(tmp_path)
    assert train(other, 3) == train(trainer, 3)

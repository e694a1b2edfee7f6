"""fp32 masters: what low precision would lose, they keep, whoever writes to the model and whatever changes."""

from __future__ import annotations

import logging

import pytest
import torch
from thinned import pairwise
from torch import nn

import accelcore
from accelcore.precision.policy import Policy

BF16 = Policy(model_dtype="bfloat16")


def foreign(parameters, **options):
    return torch.optim.AdamW(parameters, **options)


def ours(parameters, **options):
    return accelcore.select("cpu").optimizers.create("adamw", parameters, **options)


KINDS = pytest.mark.parametrize("create", [ours, foreign], ids=["ours", "torch's"])
FLAT = pytest.mark.parametrize("flat", [True, False], ids=["flat", "per tensor"])


class Ones(nn.Module):
    """Two layers of ones, so that bf16, whose numbers lie 2**-7 apart here, loses any update below 2**-8."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3, bias=False), nn.Linear(4, 2, bias=False)
        nn.init.ones_(self.a.weight)
        nn.init.ones_(self.b.weight)

    def forward(self, x):
        x = x.to(self.a.weight.dtype)
        return self.a(x).float().sum() + self.b(x).float().sum()


def make(accel, create, *, precision=BF16, model=None, **options):
    model = model or Ones()
    optimizer = create(model.parameters(), lr=1e-4, weight_decay=0.0, eps=1e-12)
    return accel.trainer(model, optimizer, precision=precision, **options)


X = torch.ones(1, 4)


@KINDS
@FLAT
@pytest.mark.parametrize("precision", [BF16, Policy(model_dtype="float16"), "O2"], ids=["bf16", "fp16", "O2"])
def test_masters_start_from_the_given_values(accel, create, flat, precision, tmp_path):
    given = {"a.weight": torch.full((3, 4), 0.1), "b.weight": torch.tensor([[1e-9, 1 + 2**-20, -0.3, 0.0]] * 2)}
    model, other = Ones(), Ones()
    model.load_state_dict(given)
    make(accel, create, model=model, precision=precision, flat=flat).save(tmp_path)
    make(accel, create, model=other, precision="fp32").resume(tmp_path)
    assert {name: value.tolist() for name, value in other.state_dict().items()} == {
        name: value.tolist() for name, value in given.items()
    }


@KINDS
@FLAT
@pytest.mark.parametrize("precision", [BF16, "fp32"], ids=["masters", "fp32"])
def test_a_hundred_small_steps_are_not_lost(accel, create, flat, precision):
    trainer = make(accel, create, precision=precision, flat=flat)
    for _ in range(100):
        trainer(X)
    # Adam with equal gradients moves by lr each step: 1 - 100 * 1e-4, in bf16 the nearest number.
    expected = torch.tensor(0.99).to(trainer.model.a.weight.dtype)
    torch.testing.assert_close(trainer.model.a.weight, expected.expand(3, 4), rtol=1e-5, atol=0)
    for parameter, entry in trainer.optimizer.state.items():
        assert entry["exp_avg"].dtype == torch.float32, parameter.dtype


@pytest.mark.parametrize(("precision", "warns"), [("fp32", 1), ("16-true", 0)])
def test_fp16_parameters_without_a_loss_scale_are_reported(accel, caplog, precision, warns):
    model = nn.Linear(3, 4).half()
    accel.trainer(model, accel.optimizers.create("sgd", model.parameters()), precision=precision)
    assert caplog.text.count("no loss scale") == warns


@KINDS
@FLAT
def test_without_masters_small_steps_are_lost_and_it_is_said_once(accel, create, flat, caplog):
    with caplog.at_level(logging.WARNING, "accelcore"):
        trainer = make(accel, create, precision=Policy(model_dtype="bfloat16", masters=False), flat=flat)
        for _ in range(100):
            trainer(X)
        trainer.model.b.weight.requires_grad_(False)
        trainer.refresh()
        trainer(X)
    assert trainer.model.a.weight.eq(1).all()
    assert sum("without fp32 masters" in record.message for record in caplog.records) == 1


@KINDS
@FLAT
def test_masters_survive_a_stay_in_fp32(accel, tmp_path, create, flat):
    """60 steps of 1e-4 in bf16, 20 in fp32, 20 in bf16: as 100 in fp32, up to the last rounding."""
    for number, (steps, precision) in enumerate([(60, BF16), (20, "fp32"), (20, BF16), (0, "fp32")]):
        trainer = make(accel, create, precision=precision, flat=flat)
        if number:
            trainer.resume(tmp_path)
        for _ in range(steps):
            trainer(X)
        trainer.save(tmp_path)
    torch.testing.assert_close(trainer.model.a.weight, torch.full((3, 4), 0.99), rtol=1e-5, atol=0)


THEN, WRITE = ("train", "freeze", "save", "epoch"), ("load_state_dict", "in place", "data", "in place of data")


@pytest.mark.parametrize(
    ("create", "flat", "then", "write"),
    [each for each in pairwise((ours, foreign), (True, False), THEN, WRITE) if each.values[2:] != (THEN[0], WRITE[3])],
)
def test_what_is_written_into_the_model_is_what_its_masters_go_on_from(accel, tmp_path, create, flat, then, write):
    trainer = make(accel, create, flat=flat)
    trainer(X)
    weight = torch.full((3, 4), 2.0, dtype=torch.bfloat16)
    model = trainer.model
    if write == "load_state_dict":
        model.load_state_dict({"a.weight": weight, "b.weight": model.b.weight.detach()})
    elif write == "in place":
        with torch.no_grad():
            model.a.weight.copy_(weight)
    elif write == "in place of data":  # neither the version nor the address changes
        model.a.weight.data.copy_(weight)
    else:
        model.a.weight.data = weight.clone()
    if then == "save":
        trainer.save(tmp_path)
        trainer = make(accel, create, flat=flat)
        trainer.resume(tmp_path)
    if then == "freeze":
        trainer.model.b.weight.requires_grad_(False)
        trainer.refresh()
    for batch in trainer.batches([X] * 200) if then == "epoch" else [X] * 200:  # fewer is below bf16's spacing at 2
        trainer(batch)
    torch.testing.assert_close(trainer.model.a.weight, torch.full((3, 4), 1.98, dtype=torch.bfloat16), rtol=0, atol=0)


@KINDS
@FLAT
def test_freezing_unfreezing_and_adding_keep_the_masters_of_the_others_exact(accel, tmp_path, create, flat):
    """Each change comes when the masters are between two numbers of bf16."""
    model = Ones()
    trainer = make(accel, create, flat=flat, model=model)
    for _ in range(10):
        trainer(X)
    model.b.weight.requires_grad_(False)
    trainer.refresh()
    for _ in range(10):
        trainer(X)
    model.b.weight.requires_grad_(True)
    trainer.refresh()
    for _ in range(10):
        trainer(X)
    model.c = nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.c.weight)
    trainer.optimizer.add_param_group({"params": [model.c.weight]})
    trainer.refresh()
    model.forward = lambda x: Ones.forward(model, x) + model.c(x.bfloat16()).float().sum()
    for _ in range(30):
        trainer(X)
    trainer.save(tmp_path)

    whole = Ones()
    whole.c = nn.Linear(4, 3, bias=False)
    optimizer = create([whole.a.weight, whole.b.weight], lr=1e-4, weight_decay=0.0, eps=1e-12)
    optimizer.add_param_group({"params": [whole.c.weight]})
    exact = accel.trainer(whole, optimizer)
    exact.resume(tmp_path)
    torch.testing.assert_close(whole.a.weight, torch.full((3, 4), 1 - 60e-4), rtol=1e-5, atol=0)
    torch.testing.assert_close(whole.c.weight, torch.full((3, 4), 1 - 30e-4), rtol=1e-5, atol=0)


@KINDS
@FLAT
def test_a_model_of_several_dtypes_has_masters_only_where_they_are_needed(accel, tmp_path, create, flat):
    model = Ones()
    model.a.bfloat16()
    model.forward = lambda x: model.a(x.bfloat16()).float().sum() + model.b(x).sum()
    trainer = make(accel, create, precision="fp32", flat=flat, model=model)
    for _ in range(100):
        trainer(X)
    torch.testing.assert_close(model.a.weight, torch.full((3, 4), 0.99, dtype=torch.bfloat16), rtol=0, atol=0)
    torch.testing.assert_close(model.b.weight, torch.full((2, 4), 0.99), rtol=1e-5, atol=0)
    trainer.save(tmp_path)
    trainer.resume(tmp_path)
    trainer(X)
    torch.testing.assert_close(model.b.weight, torch.full((2, 4), 0.9899), rtol=1e-5, atol=0)


@KINDS
@FLAT
def test_a_refused_resume_leaves_masters_exact(accel, tmp_path, create, flat):
    other = nn.Linear(2, 1)
    accel.trainer(other, torch.optim.SGD(other.parameters(), lr=0.1)).save(tmp_path)
    trainer = make(accel, create, flat=flat)
    for _ in range(10):
        trainer(X)
    with pytest.raises(accelcore.CheckpointError, match="another model"):
        trainer.resume(tmp_path)
    for _ in range(90):
        trainer(X)
    torch.testing.assert_close(trainer.model.a.weight, torch.full((3, 4), 0.99, dtype=torch.bfloat16), rtol=0, atol=0)

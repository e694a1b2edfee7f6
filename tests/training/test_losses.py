"""What a model, or a loss of one's own, may return."""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn

import accelcore

SCALERS = accelcore.select("cpu").scaler


@dataclass
class Output:
    """As of a Hugging Face model."""

    loss: torch.Tensor | None
    logits: torch.Tensor


class Named(NamedTuple):
    logits: torch.Tensor
    loss: torch.Tensor


FORMS = {
    "scalar": lambda loss, logits: loss,
    "pair": lambda loss, logits: (loss, logits),
    "object": Output,
    "dict": lambda loss, logits: OrderedDict(logits=logits, loss=loss),
    "named tuple": lambda loss, logits: Named(logits, loss),
}


class Model(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.layer, self.form = nn.Linear(3, 2), form
        nn.init.ones_(self.layer.weight)

    def forward(self, rows):
        logits = self.layer(rows)
        return self.form(logits.square().mean(), logits)


def train(accel, form, loss):
    model = Model(form)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    trainer = accel.trainer(model, optimizer, loss=loss)
    found = trainer(torch.ones(2, 3))
    return found, trainer


@pytest.mark.parametrize("loss", [None, lambda model, batch: model(batch)], ids=["the model's", "one's own"])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_trained_on(accel, name, loss):
    found, trainer = train(accel, FORMS[name], loss)
    logits = {
        "object": lambda aux: aux.logits, "dict": lambda aux: aux["logits"], "named tuple": lambda aux: aux.logits,
        "pair": lambda aux: aux, "scalar": lambda aux: aux,
    }[name](trainer.aux)  # fmt: skip
    if name == "scalar":
        assert logits is None
    else:
        torch.testing.assert_close(found, logits.square().mean())
        assert not logits.requires_grad
    assert not torch.equal(trainer.model.layer.weight, torch.ones(2, 3))


def test_a_model_may_return_more_and_a_loss_of_ones_own_may_not(accel):
    found, trainer = train(accel, lambda loss, logits: (loss, logits, "hidden"), None)
    torch.testing.assert_close(found, trainer.aux[0].square().mean())
    assert trainer.aux[1] == "hidden"
    with pytest.raises(accelcore.TrainingError, match="a tuple of 3"):
        train(accel, lambda loss, logits: (loss, logits, 3), lambda model, batch: model(batch))
    with pytest.raises(accelcore.TrainingError, match="a tuple of 1"):
        train(accel, lambda loss, logits: (loss,), None)
    for own in (None, lambda model, batch: model(batch)):
        with pytest.raises(accelcore.TrainingError, match=r"must be a scalar(.|\n)*the first is the loss"):
            train(accel, lambda loss, logits: (logits, loss), own)


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (lambda loss, logits: Output(None, logits), "labels"),
        (lambda loss, logits: {"logits": logits}, r"no \"loss\"(.|\n)*'logits'"),
        (lambda loss, logits: 0.5, r"the loss is a float(.|\n)*without \.item\(\)"),
        (lambda loss, logits: SCALERS.create().scale(loss), r"is scaled(.|\n)*without scaler\.scale\(\)"),
        (lambda loss, logits: SCALERS.create(init=2.0, dynamic=False).scale(loss), "is scaled"),
        (lambda loss, logits: logits, "not a scalar(.|\n)*loss= was not given"),
    ],
)
def test_what_has_no_loss_is_refused(accel, form, says):
    with pytest.raises(accelcore.TrainingError, match=says):
        train(accel, form, None)


class Pairs(NamedTuple):
    left: torch.Tensor
    names: list


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python shows notes since 3.11")
@pytest.mark.parametrize(
    ("batch", "kind", "words"),
    [
        ((torch.ones(3, 5), torch.ones(3, dtype=torch.int64)), RuntimeError, ["float32 (3, 5) on cpu", "int64 (3,)"]),
        ({"x": torch.ones(2, 4), "id": "a"}, KeyError, ["'x': float32 (2, 4)", "'id': a str"]),
        (Pairs(torch.ones(1, 9), [1, 2]), RuntimeError, ["a Pairs", "float32 (1, 9)", "a list of (an int, an int)"]),
        ([7] * 20, TypeError, ["a list of (an int, ", "and 12 more"]),
        ({"text": "a"}, KeyError, ["'text': a str"]),
    ],
)
def test_an_error_within_a_loss_keeps_its_class_and_notes_step_and_batch(accel, batch, kind, words):
    model = nn.Linear(4, 2)
    trainer = accel.trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch[0]).sum(),
        accumulate=2,
    )
    good = (torch.ones(3, 4),)
    for _ in range(3):
        trainer(good)
    with pytest.raises(kind) as caught:
        trainer(batch)
    note, *hints = caught.value.__notes__
    assert len(hints) == (kind is TypeError), "of a batch without tensors"
    assert all(word in note for word in ["step 2, micro-batch 2 of 2", *words]), note
    trainer(good)
    trainer(good)
    assert trainer.steps == 2


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python shows notes since 3.11")
@pytest.mark.parametrize(
    ("precision", "dtype", "names"),
    [
        (accelcore.Policy(model_dtype="bfloat16"), torch.float32, ["float32", "bfloat16", "cast_boundary=True"]),
        ("fp32", torch.float64, ["float64", "float32", "to(torch.float32)"]),
    ],
)
def test_an_error_of_torchs_on_dtypes_has_a_note_with_both_and_the_remedy(accel, precision, dtype, names):
    model = nn.Linear(3, 1)
    optimizer = accel.optimizers.create("sgd", model.parameters())
    trainer = accel.trainer(model, optimizer, loss=lambda model, batch: model(batch).sum(), precision=precision)
    with pytest.raises(RuntimeError) as caught:
        trainer(torch.zeros(4, 3, dtype=dtype))
    assert all(name in caught.value.__notes__[-1] for name in names)
    with pytest.raises(RuntimeError, match="shapes") as caught:
        trainer(torch.zeros(4, 5, dtype=next(trainer.model.parameters()).dtype))
    assert len(caught.value.__notes__) == 1, "an error of another kind"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python shows notes since 3.11")
def test_an_error_on_classes_that_are_no_whole_numbers_has_no_note_to_cast_them_to_the_models_dtype(accel):
    model = nn.Linear(3, 2)
    trainer = accel.trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )
    with pytest.raises(RuntimeError, match="Long") as caught:
        trainer((torch.zeros(4, 3), torch.zeros(4, dtype=torch.float64)))
    assert len(caught.value.__notes__) == 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python shows notes since 3.11")
def test_a_hidden_state_that_keeps_its_graph_has_a_note_to_detach_it(accel):
    model, kept = nn.Linear(3, 3), []

    def loss(model, batch):
        kept.append(model(batch + (kept[-1] if kept else 0)))
        return kept[-1].square().mean()

    trainer = accel.trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    trainer(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="second time") as caught:
        trainer(torch.ones(2, 3))
    assert "detach()" in caught.value.__notes__[-1]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python shows notes since 3.11")
@pytest.mark.parametrize("function", ["backward", "autograd.grad"])
def test_a_loss_function_that_frees_its_graph_has_a_note_of_it(accel, function):
    def loss(model, batch):
        value = model(batch).square().mean()
        if function == "backward":
            value.backward()
        else:
            torch.autograd.grad(value, model.weight)
        return value

    model = nn.Linear(3, 3)
    trainer = accel.trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    with pytest.raises(RuntimeError, match="second time") as caught:
        trainer(torch.ones(2, 3))
    assert f"{function}(" in caught.value.__notes__[-1]

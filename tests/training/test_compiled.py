"""Compiled training equals eager training, also where a compiled model writes its memory anew.

With inductor: the suite's TestCompiler, which tests/testing/test_lies.py runs.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from toys import data, loss_of, net

import accelcore
from accelcore.roles.compiler import Compiled, Compiler


def test_compiled_training_equals_eager_training(accel, caplog):
    caplog.set_level("INFO")
    eager, compiled = net(), net()
    for model, compile_ in ((eager, False), (compiled, {"backend": "eager", "dynamic": False})):
        trainer = accel.trainer(
            model, accel.optimizers.create("sgd", model.parameters(), lr=0.1), loss=loss_of, compile=compile_
        )
        for batch in data(3):
            trainer(batch)
    assert trainer.compiled is not None
    assert trainer.compiled.compiled, trainer.compiled.reason
    assert sum("take longer" in line for line in caplog.messages) == 1
    for one, other in zip(eager.state_dict().values(), compiled.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other)


class InGraphs(torch.autograd.Function):
    """A linear map as CUDA graphs compute it: outputs and gradients are the same memory at each call."""

    memory = tuple(torch.empty(shape) for shape in ((4, 2), (2, 6), (2,)))

    @staticmethod
    def forward(ctx, rows, weight, bias):
        ctx.save_for_backward(rows)
        InGraphs.memory[0].copy_(rows @ weight.t() + bias)
        return InGraphs.memory[0].detach()

    @staticmethod
    def backward(ctx, gradient):
        (rows,) = ctx.saved_tensors
        InGraphs.memory[1].copy_(gradient.t() @ rows)
        InGraphs.memory[2].copy_(gradient.sum(0))
        return None, InGraphs.memory[1].detach(), InGraphs.memory[2].detach()


class GraphCompiler(Compiler):
    def compile(self, module, options):
        def run(rows):
            return InGraphs.apply(rows, module.weight, module.bias)

        return Compiled(run, compiled=True, overwrites=True)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_memory_that_a_compiled_model_writes_anew_is_copied(accel, accumulate):
    found = []
    for compile_ in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 2)
        trainer = dataclasses.replace(accel, compiler=GraphCompiler()).trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss=lambda forward, batch: forward(batch).select(0, 0).select(0, 0),  # a view of the output
            accumulate=accumulate,
            compile=compile_,
        )
        losses = [trainer(torch.full((4, 6), float(number))) for number in range(1, 8)]
        trainer.flush()
        found.append((torch.stack(losses), model.weight.detach().clone(), model.bias.detach().clone()))
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_gradients_of_two_backward_passes_add_up_although_a_compiled_model_writes_them_anew(accel):
    model = nn.Linear(6, 2)
    trainer = dataclasses.replace(accel, compiler=GraphCompiler()).trainer(
        model, torch.optim.SGD(model.parameters(), lr=1.0), compile=True
    )
    for number in (1.0, 2.0):
        trainer.backward(trainer.forward(torch.full((4, 6), number)).sum())
    assert model.weight.grad.tolist() == [[12.0] * 6] * 2


def test_two_ways_to_capture_are_refused_before_anything_changes(accel):
    graphs = dataclasses.replace(accel.capabilities, graphs=True)
    backend = dataclasses.replace(accel, compiler=GraphCompiler(), capabilities=graphs)
    model = nn.Linear(6, 2)
    optimizer = accel.optimizers.create("adamw", model.parameters())
    with pytest.raises(accelcore.ConfigurationError, match="graph=True"):
        backend.trainer(model, optimizer, compile=True, graph=True, precision="O2")
    assert model.weight.dtype is torch.float32
    accel.trainer(model, optimizer)


def test_a_compiled_model_keeps_its_other_methods(accel):
    class Model(nn.Linear):
        def own_loss(self, batch):
            return self(batch[0]).square().mean()

    model = Model(6, 2)
    trainer = accel.trainer(
        model,
        accel.optimizers.create("sgd", model.parameters()),
        loss=lambda m, b: m.own_loss(b),
        compile={"backend": "eager"},
    )
    assert trainer(data(1)[0]).ndim == 0

"""Activation checkpointing: the same training, less memory between forward and backward."""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, gelu

import accelcore
from accelcore import ConfigurationError, Recompute, UnsupportedError


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(width, 4 * width), nn.BatchNorm1d(4 * width)
        self.drop, self.outer = nn.Dropout(0.3), nn.Linear(4 * width, width)

    def forward(self, x, *, scale=1.0):
        return x + self.outer(self.drop(gelu(self.norm(self.inner(x))))) * scale


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


MATMUL = torch.ops.aten.addmm.default


def train(accel, *, model=None, steps=4, **options):
    torch.manual_seed(0)
    model = model or Net()
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=1e-2)
    trainer = accel.trainer(model, optimizer, loss=lambda m, rows: m(rows).float().square().mean(), **options)
    losses = [trainer(torch.randn(16, 8, generator=torch.Generator().manual_seed(n))).item() for n in range(steps)]
    return trainer, losses


def same(one, other):
    mine, theirs = one.model.state_dict(), other.model.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "O1", "O2"])
@pytest.mark.parametrize(
    "checkpoint",
    [Block, (Block,), lambda module: isinstance(module, Block), Recompute(Block, save=[MATMUL]), Recompute(Block)],
    ids=["type", "types", "function", "save", "no save"],
)
def test_losses_weights_and_statistics_are_those_without(accel, precision, checkpoint):
    plain, expected = train(accel, precision=precision)
    trainer, losses = train(accel, precision=precision, checkpoint=checkpoint)
    assert losses == expected
    assert same(trainer, plain), "dropout or running statistics are others"


@pytest.mark.parametrize("options", [{"accumulate": 2, "clip_norm": 0.1}, {"flat": True}, {"loss_scale": "dynamic"}])
def test_with_other_options(accel, options):
    plain, expected = train(accel, **options)
    trainer, losses = train(accel, checkpoint=Block, **options)
    assert losses == expected
    assert same(trainer, plain)


class Masked(nn.Module):
    """Linear in its weight: where masks are the same, the gradient of its sum times the weight is the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4096))

    def forward(self, rows):
        return dropout(dropout(rows, 0.5) * self.weight, 0.5)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.masked = Masked()

    def forward(self, rows):
        return self.masked(rows).sum()


def test_masks_of_dropout_are_the_same_where_a_compiler_computes_anew(accel):
    model = Sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    products = []
    weight = model.masked.weight
    optimizer.register_step_pre_hook(lambda *_: products.append((weight.grad * weight.detach()).sum().item()))
    trainer = accel.trainer(
        model, optimizer, loss=lambda m, rows: m(rows), checkpoint=Masked, compile={"backend": "aot_eager"}
    )
    losses = [trainer(torch.rand(4096)).item() for _ in range(3)]
    assert products == pytest.approx(losses, rel=1e-4)


def kept(accel, **options):
    """Bytes that a forward pass keeps for backward, but for parameters."""
    model = Net(width=32)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    trainer = accel.trainer(model, optimizer, **options)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen = {}

    def note(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            seen[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        trainer.forward(torch.randn(64, 32))
    return sum(seen.values())


def test_less_is_kept(accel):
    assert kept(accel, checkpoint=Block) < kept(accel) / 5


def test_evaluation_and_copies_are_plain(accel):
    trainer, _ = train(accel, checkpoint=Block)
    model = trainer.model
    model.eval()
    twin = copy.deepcopy(model)
    assert type(twin.blocks[0]) is Block
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    rows = torch.randn(4, 8)
    with torch.no_grad():
        assert torch.equal(model(rows), twin(rows))
        assert torch.equal(model(rows), loaded(rows))
    assert list(twin.state_dict()) == list(model.state_dict()) == list(Net().state_dict())


def test_a_trainer_that_is_gone_takes_it_back(accel):
    trainer, _ = train(accel, checkpoint=Block)
    model = trainer.model
    assert isinstance(model.blocks[0], Block)
    del trainer
    gc.collect()
    assert all(type(block) is Block for block in model.blocks)


def test_an_observer_is_told_of_an_output_once(accel):
    class Outputs(accelcore.Observer):
        def __init__(self):
            self.names = []

        def output(self, name, value):
            self.names.append(name)

    plain, anew = Outputs(), Outputs()
    train(accel, steps=1, observers=[plain])
    train(accel, steps=1, observers=[anew], checkpoint=Block)
    assert anew.names == plain.names


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"checkpoint": nn.LSTM}, ConfigurationError, "chooses no part of this model"),
        ({"checkpoint": 3}, ConfigurationError, "checkpoint=3 does not choose modules"),
        ({"checkpoint": ()}, ConfigurationError, "does not choose modules"),
        ({"checkpoint": Block, "graph": True}, ConfigurationError, "checkpoint= and graph=True"),
        ({"offload": Block, "graph": True}, ConfigurationError, "offload= and graph=True"),
        ({"offload": Block, "compile": True}, ConfigurationError, "offload= and compile=True"),
        ({"offload": Block}, UnsupportedError, "does not declare streams and pinned memory"),
        ({"offload": "Block"}, ConfigurationError, "offload='Block' does not choose"),
    ],
)
def test_what_cannot_be_is_refused(accel, options, error, says):
    model = Net()
    with pytest.raises(error, match=says):
        train(accel, model=model, **options)
    assert type(model.blocks[0]) is Block

"""A model held in one dtype: what is cast and what is not, in memory, at its boundary, and in its state_dict."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, UserDict
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accelcore.precision.cast_model import cast_boundary, fp32_state_dict, hold

LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


class Mixed(nn.Module):
    """One of everything that a cast may touch, or may not."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.plain_norm = nn.BatchNorm2d(4, affine=False)
        self.sync = nn.SyncBatchNorm(4)
        self.layer_norm = nn.LayerNorm(4)
        self.lstm = nn.LSTM(4, 3)
        self.tied = nn.Linear(4, 4, bias=False)
        self.also_tied = nn.Linear(4, 4, bias=False)
        self.also_tied.weight = self.tied.weight
        self.register_buffer("positions", torch.arange(4))
        self.register_buffer("phases", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        x = self.plain_norm(self.norm(self.conv(x))).mean((2, 3))
        return self.also_tied(self.tied(self.layer_norm(x))) * self.scale


BATCHNORM = {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}
BATCHNORM |= {name.replace("norm", "sync", 1) for name in BATCHNORM}


def tensors(model):
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


@LOW
@pytest.mark.parametrize("keep", [True, False])
def test_what_is_held_and_what_stays(dtype, keep):
    model = Mixed()
    before, exact = tensors(model), copy.deepcopy(tensors(model))
    hold(model, dtype, keep_batchnorm_fp32=keep)
    after = tensors(model)
    for name, tensor in after.items():
        assert tensor is before[name], f"{name}: an optimizer would have lost it"
        if not exact[name].is_floating_point():
            expected = exact[name].dtype
        else:
            expected = torch.float32 if keep and name in BATCHNORM else dtype
        assert tensor.dtype == expected, name
        assert torch.equal(tensor, exact[name].to(expected)), name
    assert model.also_tied.weight is model.tied.weight
    model(torch.randn(3, 2, 5, 5, dtype=dtype)).float().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.dtype == parameter.dtype, name


def test_holding_again_changes_nothing_and_in_fp32_takes_it_back():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    hold(model, torch.float16, keep_batchnorm_fp32=True)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors(model).items()}
    hold(model, torch.float16, keep_batchnorm_fp32=True)
    assert addresses == {name: tensor.data_ptr() for name, tensor in tensors(model).items()}
    hold(model, torch.float16, keep_batchnorm_fp32=False)
    assert model[1].weight.dtype == torch.float16
    hold(model, torch.float16, keep_batchnorm_fp32=True)
    assert model[1].weight.dtype == torch.float32
    hold(model, torch.float32, keep_batchnorm_fp32=False)
    assert {tensor.dtype for tensor in tensors(model).values()} == {torch.float32, torch.int64}


def test_a_gradient_is_cast_with_its_parameter_and_can_be_added_to():
    model = nn.Linear(2, 1, bias=False)
    model(torch.ones(1, 2)).sum().backward()
    hold(model, torch.bfloat16, keep_batchnorm_fp32=True)
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad.dtype == torch.bfloat16
    assert model.weight.grad.tolist() == [[2.0, 2.0]]


# The boundary.


class Pair(NamedTuple):
    left: object
    right: object


@dataclass(frozen=True)
class Frozen:
    tensor: torch.Tensor
    name: str


@dataclass
class Derived:
    tensor: torch.Tensor
    count: int = field(init=False, default=3)


@dataclass
class Output(OrderedDict):
    """In the style of Hugging Face's `ModelOutput`: a mapping and a dataclass, the same by key and by name."""

    logits: torch.Tensor | None = None
    hidden: tuple[torch.Tensor, ...] | None = None

    def __post_init__(self):
        for each in fields(self):
            if getattr(self, each.name) is not None:
                OrderedDict.__setitem__(self, each.name, getattr(self, each.name))

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)

    def __reduce__(self):
        return type(self), tuple(getattr(self, each.name) for each in fields(self))


class Returns(nn.Module):
    """Returns what it was given, and keeps it."""

    def forward(self, *given, **named):
        self.given = given, named
        return (given, named)


def kept(tree):
    """The leaves of a tree, in order."""
    if isinstance(tree, dict | UserDict):
        return [leaf for value in tree.values() for leaf in kept(value)]
    if isinstance(tree, list | tuple):
        return [leaf for value in tree for leaf in kept(value)]
    if isinstance(tree, Frozen | Derived):
        return [leaf for value in vars(tree).values() for leaf in kept(value)]
    return [tree]


leaves = st.sampled_from([torch.ones(2), torch.ones(2, dtype=torch.float64), torch.arange(2), "text", None, 1.5, True])
leaves |= st.just(torch.zeros(1, dtype=torch.complex64))
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner)
        | st.dictionaries(st.sampled_from("abc"), inner).map(OrderedDict)
        | st.dictionaries(st.sampled_from("abc"), inner).map(UserDict)
        | st.builds(Pair, inner, inner)
        | st.builds(Frozen, inner, st.just("name"))
        | st.builds(Derived, inner)
        | st.builds(Output, inner.filter(lambda leaf: leaf is not None), inner.map(lambda leaf: (leaf,)))
    ),
    max_leaves=8,
)


@given(given=trees, named=trees)
def test_floating_point_tensors_are_cast_wherever_they_are_and_nothing_else_is(given, named):
    model = Returns()
    boundary = cast_boundary(model, inputs=torch.float16, outputs=torch.float32)
    before = kept([given, named])
    returned, also_returned = model(given, named=named)
    seen = kept([model.given[0][0], model.given[1]["named"]])
    after = kept([returned[0], also_returned["named"]])
    assert [type(x) for x in (model.given[0][0], returned[0])] == [type(given)] * 2
    for old, inside, outside in zip(before, seen, after, strict=True):
        if isinstance(old, torch.Tensor) and old.is_floating_point():
            assert (inside.dtype, outside.dtype) == (torch.float16, torch.float32)
        else:
            assert inside is old
            assert outside is old
    assert all(new is old for new, old in zip(kept([given, named]), before, strict=True)), "it wrote into the caller's"
    for hook in boundary:
        hook.remove()
    model(given)
    assert model.given[0][0] is given, "a hook is left"


def test_a_container_in_which_nothing_is_cast_is_passed_on_itself():
    """A model may append to a list that it is given."""
    model, cache = Returns(), [torch.arange(3)]
    cast_boundary(model, inputs=torch.float16, outputs=None)
    assert model(cache)[0][0] is cache


@LOW
@pytest.mark.parametrize("wrap", ["alone", "deepcopy", "pickle", "compiled"])
def test_a_held_model_behind_its_boundary_trains_on_fp32(dtype, wrap):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    hold(model, dtype, keep_batchnorm_fp32=True)
    cast_boundary(model, inputs=dtype, outputs=torch.float32)
    if wrap == "deepcopy":
        model = copy.deepcopy(model)
    if wrap == "pickle":
        model = pickle.loads(pickle.dumps(model))
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if wrap == "compiled" else model
    x = torch.randn(5, 4, requires_grad=True)
    inside = []
    if wrap == "alone":
        model[1].register_forward_hook(lambda module, given, output: inside.append(output.dtype))
    y = called(x)
    assert y.dtype == torch.float32
    assert inside in ([], [dtype])
    y.sum().backward()
    assert x.grad.dtype == torch.float32, "a gradient has the dtype of its tensor"
    assert [p.grad.dtype for p in model.parameters()] == [dtype, dtype, torch.float32, torch.float32, dtype, dtype]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch hides it, but as error
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")  # of torch 2.7
@pytest.mark.parametrize(("kind", "whole"), [(dict, True), (Output, False)])  # dynamo leaves the graph for the latter
def test_a_mapping_is_cast_in_a_compiled_model(kind, whole):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return kind(logits=self.layer(x), hidden=(x, x))

    model = Model()
    hold(model, torch.bfloat16, keep_batchnorm_fp32=True)
    cast_boundary(model, inputs=torch.bfloat16, outputs=torch.float32)
    output = torch.compile(model, backend="eager", fullgraph=whole)(x=torch.ones(1, 2))
    assert type(output) is kind
    assert output["logits"].dtype == output["hidden"][1].dtype == torch.float32


# The state_dict.


@LOW
@pytest.mark.parametrize("keep", [True, False])
def test_the_state_dict_of_a_held_model_and_of_its_parts_is_fp32_and_goes_back_in(dtype, keep):
    model = Mixed()
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    hold(model, dtype, keep_batchnorm_fp32=keep)
    in_fp32 = fp32_state_dict(model)
    state = model.state_dict()
    assert list(state) == list(plain)
    for name, value in state.items():
        assert value.dtype == plain[name].dtype, name
        assert torch.equal(value, tensors(model)[name].to(value.dtype)), name
    assert model.conv.state_dict()["weight"].dtype == torch.float32, "a part's"
    wrapper = nn.Sequential(model)
    assert wrapper.state_dict()["0.conv.weight"].dtype == torch.float32, "as a part"
    assert model.state_dict(keep_vars=True)["conv.weight"] is model.conv.weight
    model.load_state_dict(plain)
    assert torch.equal(model.conv.weight, plain["conv.weight"].to(dtype))
    for hook in in_fp32:
        hook.remove()
    assert model.state_dict()["conv.weight"].dtype == dtype


def test_a_copy_of_a_held_model_keeps_its_fp32_state_dict():
    model = nn.Linear(2, 2)
    hold(model, torch.bfloat16, keep_batchnorm_fp32=True)
    fp32_state_dict(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.state_dict()["weight"].dtype == torch.float32

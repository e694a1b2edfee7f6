from __future__ import annotations

import collections
import dataclasses
import random
import types
from typing import NamedTuple

import numpy
import pytest
import torch

from accelcore.errors import CheckpointError
from accelcore.roles.runtime import TorchRuntime


@pytest.fixture
def elsewhere():
    """A device that is not the CPU, so that moving there can be seen."""
    return TorchRuntime(torch.device("meta"))


@pytest.fixture(autouse=True)
def _generators():
    """Tests that seed leave no trace for the next."""
    state = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    yield
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    numpy.random.set_state(state[2])


def draw():
    """Numbers from every generator, an odd count of normal ones, so that each keeps one in its cache."""
    return (
        [random.random(), random.gauss(0, 1)],
        torch.rand(3).tolist(),
        torch.randn(5).tolist(),
        numpy.random.rand(3).tolist(),
        numpy.random.randn(3).tolist(),
    )


# Random numbers.


@pytest.mark.parametrize(("n", "for_numpy"), [(7, 7), (2**31 + 5, 2**31 + 5), (2**32 + 7, 7)])
def test_a_seed_gives_the_numbers_that_torch_python_and_numpy_give_for_it(accel, n, for_numpy):
    accel.runtime.seed(n)
    ours = draw()
    random.seed(n)
    torch.manual_seed(n)
    numpy.random.seed(for_numpy)  # which takes 32 bits
    assert ours == draw()


def test_taking_the_random_state_draws_nothing(accel):
    accel.runtime.seed(3)
    first = draw()
    accel.runtime.seed(3)
    accel.runtime.rng_state()
    assert draw() == first


@pytest.mark.parametrize("key", ["torch", "python", "python_gauss"])
def test_a_random_state_that_lacks_a_generator_is_refused_and_changes_nothing(accel, key):
    accel.runtime.seed(3)
    state = accel.runtime.rng_state()
    first = draw()
    accel.runtime.set_rng_state(state)
    accel.runtime.seed(3)
    with pytest.raises(CheckpointError, match="random state"):
        accel.runtime.set_rng_state({k: torch.zeros_like(value) for k, value in state.items() if k != key})
    assert draw() == first


def test_a_random_state_without_numpys_leaves_numpys_alone(accel):
    accel.runtime.seed(3)
    state = {key: value for key, value in accel.runtime.rng_state().items() if not key.startswith("numpy")}
    first = numpy.random.rand(3).tolist()
    numpy.random.seed(3)
    assert accel.runtime.set_rng_state(state) == []
    assert numpy.random.rand(3).tolist() == first


# The way onto the device.


class Pair(NamedTuple):
    left: object
    right: object


@dataclasses.dataclass(frozen=True)
class Example:
    inputs: torch.Tensor
    name: str
    more: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Counted:
    inputs: torch.Tensor
    size: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.size = len(self.inputs)


class Named(dict):
    __getattr__ = dict.__getitem__  # any other name is a KeyError


class NamedOnPython310(Named):
    def __getstate__(self):
        return self["__getstate__"]  # there a copy looks it up as an attribute


T = torch.ones(2)


def devices(value):
    """Where each tensor in a nested value is, by path."""
    if isinstance(value, torch.Tensor):
        return value.device.type
    if isinstance(value, collections.abc.Mapping):
        return {key: devices(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [devices(entry) for entry in value]
    if dataclasses.is_dataclass(value):
        return {field.name: devices(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


@pytest.mark.parametrize(
    "batch",
    [
        T,
        torch.nn.Parameter(torch.ones(2)),
        [T, [T, 3]],
        (T, "label", None),
        {"inputs": T, "deep": {"er": [T, (T,)]}},
        Pair(T, [T]),
        Example(T, "name", {"mask": T}),
        collections.OrderedDict(b=T, a=1),
        collections.defaultdict(list, {"a": T, "b": [T]}),
        collections.Counter(a=2),
        collections.UserDict({"a": T}),
        types.MappingProxyType({"a": T}),
        Named(a=T),
        Named(to=print),
        NamedOnPython310(a=T),
        Counted(T),
        torch.ones(2, 2).max(0),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_every_tensor_of_a_batch_is_moved_and_its_form_kept(elsewhere, batch):
    moved = elsewhere.to_device(batch)
    assert type(moved) is type(batch) or isinstance(batch, torch.nn.Parameter)
    text = repr(devices(batch))
    assert repr(devices(moved)) == text.replace("cpu", "meta")
    assert repr(devices(batch)) == text, "the batch itself was changed"


def test_a_default_dict_keeps_its_default_and_an_ordered_one_its_order(accel):
    moved = accel.runtime.to_device(collections.defaultdict(list, a=T))
    assert moved["new"] == []
    assert list(accel.runtime.to_device(collections.OrderedDict(b=T, a=T))) == ["b", "a"]


def test_a_packed_sequence_is_moved_as_torch_moves_it(elsewhere):
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    moved = elsewhere.to_device(packed)
    assert moved.data.device.type == "meta"
    assert moved.batch_sizes.device.type == "cpu", "torch wants these on the host"


@pytest.mark.parametrize("thing", [None, 3, "text", b"bytes", {1, 2}, object(), Example, numpy.ones(2), torch.float32])
def test_what_is_no_tensor_stays_what_it_is(elsewhere, thing):
    assert elsewhere.to_device(thing) is thing
    assert elsewhere.to_device([thing])[0] is thing


# The device itself.

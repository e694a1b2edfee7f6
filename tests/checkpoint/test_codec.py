"""State trees survive the way through JSON and tensors."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

import accelcore
from accelcore.checkpoint.codec import decode, encode

plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5), st.just("$")
)
tensors = st.builds(torch.tensor, st.lists(st.floats(width=32, allow_nan=False), max_size=3))
trees = st.recursive(
    plain | tensors,
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.just("$"), children, max_size=3)
        | st.dictionaries(st.integers(), children, max_size=3)
    ),
    max_leaves=12,
)


def equal(first, second):
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return list(first) == list(second) and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    return first == second


@given(trees)
def test_a_tree_comes_back_as_it_was(tree):
    data, stored = encode({"tree": tree})
    assert equal(decode(json.loads(json.dumps(data)), stored)["tree"], tree)


def test_counters_and_infinities_come_back():
    tree = {"milestones": Counter({3: 2, 5: 1}), "best": float("-inf"), "empty": ()}
    data, stored = encode(tree)
    back = decode(json.loads(json.dumps(data)), stored)
    assert back == tree
    assert sorted(back["milestones"].elements()) == [3, 3, 5]


def test_a_tensor_named_twice_is_stored_once_and_a_view_without_its_buffer():
    buffer = torch.arange(1000.0)
    view = buffer[10:12]
    _, stored = encode({"a": view, "b": {"c": view}, "other": buffer[11:13], "flat": buffer.view(10, 100)})
    assert set(stored) == {"a", "other", "flat"}
    assert stored["a"].untyped_storage().nbytes() == 8
    assert len({tensor.data_ptr() for tensor in stored.values()}) == 3


def test_conjugate_and_negative_views_are_stored_as_their_values():
    """Files hold memory, and that of such a view holds the opposite."""
    values, numbers = torch.tensor([1 + 2j, 3 - 1j]), torch.tensor([1.0, -2.0])
    tree = {"values": values, "conjugate": values.conj(), "numbers": numbers, "negative": torch._neg_view(numbers)}
    data, stored = encode(tree)
    for name, tensor in load(save(stored)).items():
        assert torch.equal(tensor, tree[name]), name
    assert decode(data, stored).keys() == tree.keys()
    assert len(stored) == 4


def test_strides_do_not_change_values():
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    data, stored = encode({"image": image})
    assert torch.equal(decode(data, stored)["image"], image)


@pytest.mark.parametrize("thing", [object(), {1, 2}, b"bytes", len], ids=["object", "set", "bytes", "function"])
def test_anything_else_is_refused_by_its_path(thing):
    with pytest.raises(accelcore.CheckpointError, match=r"^a\.1\.b is an? "):
        encode({"a": [0, {"b": thing}]})


@pytest.mark.parametrize("kind", [list, dict, tuple])
def test_what_holds_itself_or_is_nested_too_deeply_is_refused_by_its_path(kind):
    below: list[object] = []
    loop = {"again": below} if kind is dict else kind([below])
    below.append(loop)
    with pytest.raises(accelcore.CheckpointError, match=r"^a\..* holds itself"):
        encode({"a": {"b": loop}})
    deep: object = 1
    for _ in range(5000):
        deep = {"again": deep} if kind is dict else kind([deep])
    with pytest.raises(accelcore.CheckpointError, match=r"^a\..* is nested more than"):
        encode({"a": deep})
    twice = [1, 2]
    assert decode(encode({"a": twice, "b": [twice, twice]})[0], {}) == {"a": twice, "b": [twice, twice]}


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
def test_a_tensor_without_memory_of_its_own_is_refused_by_its_path():
    with pytest.raises(accelcore.CheckpointError, match=r"^a\.b is a Tensor.* on meta"):
        encode({"a": {"b": torch.empty(2, device="meta")}})
    made_of_two = torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))
    with pytest.raises(accelcore.CheckpointError, match=r"^a\.b is a MaskedTensor.* cannot hold"):
        encode({"a": {"b": made_of_two}})


@pytest.mark.parametrize(
    "data", [{"$": "os.system"}, {"$": "tensor", "name": "missing"}, {"$": "tuple"}, {"$": "dict", "pairs": [1]}]
)
def test_entries_of_no_known_form_are_refused(data):
    with pytest.raises(accelcore.CheckpointError):
        decode(data, {})

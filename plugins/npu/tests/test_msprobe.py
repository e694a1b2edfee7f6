"""Dumps of msprobe: a reader with strict checks, and the first module that diverges from one."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from accelcore_npu.msprobe import compare_dump, read_dump
from torch import nn

from accelcore.errors import RecordingError


def tensor(value):
    """One tensor as msprobe writes it, computed in numpy."""
    values = value.detach().double().numpy()
    return {
        "type": "torch.Tensor",
        "dtype": str(value.dtype),
        "shape": list(value.shape),
        "Max": float(values.max()),
        "Min": float(values.min()),
        "Mean": float(values.mean()),
        "Norm": float((values**2).sum() ** 0.5),
        "requires_grad": False,
    }


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2))


@pytest.fixture
def inputs():
    return torch.linspace(-1, 1, 24).reshape(6, 4)


@pytest.fixture
def dump(model, inputs, tmp_path):
    """Writes the model's own dump after a change of its entries; returns the file."""

    def write(change=lambda data: None, **head):
        data, x = {}, inputs
        for name in ("0", "1", "2.0", "2.1", "3"):
            module = model.get_submodule(name)
            entry = {"input_args": [tensor(x), {"type": "bool", "value": True}], "input_kwargs": {}}
            x = module(x)
            data[f"Module.{name}.{type(module).__name__}.forward.0"] = entry | {"output": [tensor(x)]}
        data["Module.0.Linear.backward.0"] = {"input": [None], "output": []}
        data["Functional.relu.0.forward"] = {"input_args": []}
        change(data)
        path = tmp_path / "dump.json"
        path.write_text(json.dumps({"task": "statistics", "level": "L0", "framework": "pytorch", "data": data, **head}))
        return path

    return write


def test_a_model_agrees_with_its_own_dump(dump, model, inputs):
    assert compare_dump(dump(), model, lambda: model(inputs)) is None
    found = read_dump(dump())
    assert list(found)[:2] == [("0", 0, "input 0"), ("0", 0, "output 0")]
    assert found["0", 0, "input 0"].values["Norm"] == pytest.approx(inputs.norm().item())


@pytest.mark.parametrize("name", ["0", "2.0", "3"])
def test_the_first_module_that_parts_is_named(dump, model, inputs, name):
    path, other = dump(), copy.deepcopy(model)
    with torch.no_grad():
        other.get_submodule(name).weight.mul_(1.01)
    found = compare_dump(path, other, lambda: other(inputs))
    assert (found.module, found.item) == (name, "output 0")
    assert found.ratio > 64


def test_other_data_part_at_the_input(dump, model, inputs):
    assert compare_dump(dump(), model, lambda: model(inputs * 2)).item == "input 0"
    found = compare_dump(dump(), model, lambda: model(inputs[:3]))
    assert (found.statistic, found.recorded, found.found, found.ratio) == ("shape", (6, 4), (3, 4), math.inf)


def test_a_null_is_not_compared(dump, model, inputs):
    def change(data):
        for each in ("Max", "Min", "Mean", "Norm"):
            data["Module.3.Linear.forward.0"]["output"][0][each] = None

    path = dump(change)
    with torch.no_grad():
        model[3].weight.mul_(3)
    assert compare_dump(path, model, lambda: model(inputs)) is None


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("dtype", "torch.float33", "dtype"),
        ("dtype", "torch.nn", "dtype"),
        ("shape", "6", "shape"),
        ("shape", [6, -1], "shape"),
        ("Max", "1.0", "Max"),
    ],
)
def test_a_damaged_entry_is_named(dump, key, value, why):
    def change(data):
        data["Module.2.1.Tanh.forward.0"]["output"][0][key] = value

    with pytest.raises(RecordingError, match=rf"Module\.2\.1\.Tanh(?s:.*){why}"):
        read_dump(dump(change))


@pytest.mark.parametrize(
    ("text", "why"), [("{", "cannot be read"), ("[]", "cannot be read"), ('{"data": {}}', "no module")]
)
def test_what_is_no_dump_is_refused(tmp_path, text, why):
    path = tmp_path / "dump.json"
    path.write_text(text)
    with pytest.raises(RecordingError, match=why):
        read_dump(path)
    with pytest.raises(RecordingError, match="cannot be read"):
        read_dump(tmp_path / "none.json")


def test_another_model_is_an_error_that_lists_the_modules(dump):
    other = nn.ModuleDict({"a": nn.Linear(2, 2)})
    with pytest.raises(RecordingError, match=r"2\.0"):
        compare_dump(dump(), other, lambda: other["a"](torch.ones(1, 2)))

"""Callbacks of other trainers, by stand-ins of their documented protocol: the libraries are not installed."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

import accelcore
from accelcore.parity.callbacks import huggingface_callback, lightning_callback
from accelcore.parity.compare import compare


def train():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()


def stand_in(monkeypatch, name, base):
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    setattr(sys.modules[name], base, type(base, (), {}))


def test_a_training_of_hugging_face_is_recorded_between_its_two_events(monkeypatch, tmp_path):
    stand_in(monkeypatch, "transformers", "TrainerCallback")
    callback = huggingface_callback(accelcore.Record(tmp_path / "ref"))
    callback.on_train_begin(None, None, None, model=None)
    train()
    callback.on_train_end(None, None, None)
    assert compare(tmp_path / "ref", tmp_path / "ref").agrees


def test_a_training_of_lightning_is_recorded_between_its_two_events(monkeypatch, tmp_path):
    stand_in(monkeypatch, "lightning.pytorch.callbacks", "Callback")
    callback = lightning_callback(accelcore.Record(tmp_path / "ref"))
    callback.on_train_start(None, None)
    train()
    callback.on_train_end(None, None)
    assert compare(tmp_path / "ref", tmp_path / "ref").agrees


@pytest.mark.parametrize(
    ("make", "package"), [(huggingface_callback, "transformers"), (lightning_callback, "lightning")]
)
def test_a_library_that_is_not_installed_is_named(monkeypatch, tmp_path, make, package):
    for name in ("transformers", "lightning", "lightning.pytorch.callbacks", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(accelcore.ConfigurationError, match=package):
        make(accelcore.Record(tmp_path / "ref"))

"""Callbacks of other trainers, by stand-ins of their documented protocol: the libraries are not installed."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import accelcore
from accelcore.parity.callbacks import huggingface_callback, lightning_callback
from accelcore.parity.recording import Reader


def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer):
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()


def modules_of(folder):
    step = Reader(folder / "rank-00000").step(1)
    return {(seen.event.kind, seen.event.module) for seen in step.seen}


def stand_in(monkeypatch, name, base):
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    setattr(sys.modules[name], base, type(base, (), {}))


def test_a_training_of_hugging_face_is_recorded_between_its_two_events(monkeypatch, tmp_path):
    stand_in(monkeypatch, "transformers", "TrainerCallback")
    callback = huggingface_callback(accelcore.Record(tmp_path / "ref"))
    model, optimizer = made()
    wrapper = SimpleNamespace(optimizer=optimizer)  # as accelerate's
    callback.on_train_begin(None, None, None, model=model, optimizer=wrapper, train_dataloader=[])
    train(model, optimizer)
    callback.on_train_end(None, None, None)
    assert {("batch", ""), ("output", "0"), ("parameter", "0")} <= modules_of(tmp_path / "ref")


def test_a_training_of_lightning_is_recorded_between_its_two_events(monkeypatch, tmp_path):
    stand_in(monkeypatch, "lightning.pytorch.callbacks", "Callback")
    callback = lightning_callback(accelcore.Record(tmp_path / "ref"))
    model, optimizer = made()
    callback.on_train_start(SimpleNamespace(optimizers=[optimizer]), model)
    train(model[0], optimizer)  # the module itself is not called, only what its training_step calls
    callback.on_train_end(None, None)
    assert {("batch", ""), ("output", "0"), ("parameter", "0")} <= modules_of(tmp_path / "ref")


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_gradients_and_learning_rate_are_seen_if_a_closure_computes_them(tmp_path, kind, by_name):
    def run(context, lr):
        model, _ = made()
        optimizer = kind(model.parameters(), lr=lr)

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3)).square().mean()
            loss.backward()
            return loss

        with context:  # as Lightning makes a step
            for _ in range(2):
                optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        return context

    run(accelcore.Record(tmp_path / "ref"), 0.1)
    assert {("reduced", "0"), ("learning rate", ""), ("parameter", "0")} <= modules_of(tmp_path / "ref")
    step = Reader(tmp_path / "ref" / "rank-00000").step(1)
    last = {seen.event.kind: seen.values for seen in step.seen if seen.event.item == "weight"}
    first = next(seen.values for seen in step.seen if seen.event.kind == "gradient" and seen.event.item == "weight")
    assert torch.equal(last["reduced"], first)  # of this step, not of the one before
    assert run(accelcore.Replay(tmp_path / "ref"), 0.1).result.agrees
    result = run(accelcore.Replay(tmp_path / "ref"), 0.2).result
    assert (result.step, result.item.partition(" of ")[0]) == (1, "learning rate")


@pytest.mark.parametrize(
    ("make", "package"), [(huggingface_callback, "transformers"), (lightning_callback, "lightning")]
)
def test_a_library_that_is_not_installed_is_named(monkeypatch, tmp_path, make, package):
    for name in ("transformers", "lightning", "lightning.pytorch.callbacks", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(accelcore.ConfigurationError, match=package):
        make(accelcore.Record(tmp_path / "ref"))

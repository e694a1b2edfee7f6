"""Flat memory on the NPU: parameters are saved, copied and compiled as any, and state crosses devices bit by bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import accelcore


class Late(nn.Module):
    """Its second layer is used by some batches only; one weight lies transposed in memory."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 5)
        self.first.weight.data = self.first.weight.data.t().contiguous().t()

    def forward(self, inputs):
        hidden = self.first(inputs).tanh()
        return (self.second(hidden) if inputs.shape[0] > 3 else hidden).square().mean()


def make(accel, name="adamw", **options):
    torch.manual_seed(0)
    model = Late()
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    optimizer = accel.optimizers.create(name, model.parameters(), lr=0.05, **momentum)
    return accel.trainer(model, optimizer, **options)


def train(accel, trainer, steps=3):
    for step in range(steps):
        rows = torch.randn(4 if step else 2, 6, generator=torch.Generator().manual_seed(step))
        trainer(accel.runtime.to_device((rows,)))


def everything(trainer):
    """All tensors of a training, on the host, by name."""
    found = {name: value.cpu() for name, value in trainer.model.state_dict().items()}
    for name, parameter in trainer.model.named_parameters():
        entry = trainer.optimizer.state[parameter]
        found |= {f"{name} {key}": torch.as_tensor(value).cpu() for key, value in entry.items()}
    return found


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("there", [True, False], ids=["flat there", "tensors there"])
@pytest.mark.parametrize("here", [True, False], ids=["flat here", "tensors here"])
@pytest.mark.parametrize("name", ["adamw", "rmsprop", "sgd"])
def test_state_goes_to_the_cpu_and_back_bit_by_bit(accel, tmp_path, name, here, there):
    cpu = accelcore.select("cpu")
    first = make(accel, name, flat=here)
    assert (first.optimizer.route == "npu_fused") is here
    train(accel, first)
    first.save(tmp_path / "npu")
    host = make(cpu, name, flat=there)
    host.resume(tmp_path / "npu")
    host.save(tmp_path / "cpu")
    back = make(accel, name, flat=here)
    back.resume(tmp_path / "cpu")
    assert equal(everything(first), everything(host))
    assert equal(everything(first), everything(back))
    if name == "adamw":
        steps = [everything(back)[f"{layer}.weight step"].item() for layer in ("first", "second")]
        assert steps == [3.0, 2.0]
    for trainer in (first, back):
        train(accel, trainer)
    assert equal(everything(first), everything(back))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch_npu copies a storage by an old API
@pytest.mark.parametrize("exchanges", [True, False], ids=["own storages", "one storage"])
def test_parameters_are_saved_and_copied_as_any(accel, tmp_path, monkeypatch, exchanges):
    """Also where the device cannot exchange memory, so that all parameters share one storage."""
    if not exchanges:
        monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", _refuse)
    trainer = make(accel, flat=True)
    train(accel, trainer)
    model, before = trainer.model, everything(trainer)
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert len(storages) == (4 if exchanges else 1)
    assert not model.first.weight.is_contiguous()

    torch.save(model.first.bias, tmp_path / "bias.pt")
    assert torch.equal(torch.load(tmp_path / "bias.pt", map_location="cpu"), before["first.bias"])

    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert equal(everything(trainer), before)

    saved = trainer.save(tmp_path)
    train(accel, trainer)
    assert not equal(everything(trainer), before)
    trainer.resume(saved)
    assert equal(everything(trainer), before)


def _refuse(tensor):
    raise BufferError("this device exchanges no memory")


def test_it_is_trained_compiled_as_eagerly(accel):
    trainers = [make(accel, flat=True, compile=compiled) for compiled in (False, {"backend": "aot_eager"})]
    for trainer in trainers:
        train(accel, trainer)
    eager, compiled = map(everything, trainers)
    for name, value in eager.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-6, atol=1e-6)


AUTOLOADED = """
from accelcore_npu_emulator import activate

activate()

import torch

import accelcore

accelcore.select("cpu").optimizers  # loads the core's memory before torch_npu, which has a dlpack of its own
accel = accelcore.select("npu")
model = torch.nn.Linear(2, 3)
trainer = accel.trainer(model, accel.optimizers.create("adamw", model.parameters()))
print(len({parameter.untyped_storage().data_ptr() for parameter in model.parameters()}))
"""


@pytest.mark.full  # where torch_npu was loaded first, every test of flat memory sees it
def test_storages_are_their_own_whatever_was_loaded_first(run):
    result = run("-c", AUTOLOADED, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "2"

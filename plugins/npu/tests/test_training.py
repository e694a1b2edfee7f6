"""The core's trainer on the NPU gives the CPU's results: losses, parameters, statistics, checkpoints."""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch
from torch import nn

import accelcore

STEPS = 50


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.classes = nn.Linear(36, 3)

    def forward(self, batch):
        images, labels = batch
        return nn.functional.cross_entropy(self.classes(self.features(images).flatten(1)), labels)

    @staticmethod
    def batch(step):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(6, 1, 8, 8, generator=generator)
        return images, (images.mean((1, 2, 3)) * 30).long().clamp(-1, 1) + 1


class Attention(nn.Module):
    """A language model of one block, with tied weights."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])
        self.qkv = nn.Linear(8, 24, bias=False)
        self.expand, self.contract = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, batch):
        tokens, targets = batch
        x = self.embed(tokens)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2)
        x = x + self.contract(nn.functional.gelu(self.expand(self.norms[1](x))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    @staticmethod
    def batch(step):
        start = torch.randint(11, (4, 1), generator=torch.Generator().manual_seed(step))
        tokens = (start + 3 * torch.arange(7)) % 11
        return tokens[:, :-1], tokens[:, 1:]


def make(accel, kind, optimizer="adamw", lr=0.01, **options):
    torch.manual_seed(0)
    model = kind()
    made = accel.optimizers.create(optimizer, model.parameters(), lr=lr)
    return accel.trainer(model, made, loss=lambda model, batch: model(batch), **options)


def losses(accel, trainer, kind, steps):
    found = []
    for step in steps:
        found.append(trainer(accel.runtime.to_device(kind.batch(step))).item())
    assert {parameter.device for parameter in trainer.model.parameters()} == {accel.device}
    return found


@pytest.fixture
def cpu():
    return accelcore.select("cpu")


@pytest.mark.parametrize("kind", [Convolutional, Attention])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "clip_norm": 0.5}])
def test_fp32_losses_are_the_cpus(accel, cpu, kind, options):
    ours, theirs = make(accel, kind, **options), make(cpu, kind, **options)
    found = losses(accel, ours, kind, range(STEPS))
    assert found == pytest.approx(losses(cpu, theirs, kind, range(STEPS)), abs=2e-6)
    assert math.fsum(found[STEPS // 2 :]) < math.fsum(found[: STEPS // 2])
    for name, value in theirs.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[name].cpu(), value, rtol=1e-4, atol=1e-5)


def test_tied_weights_stay_tied(accel):
    trainer = make(accel, Attention)
    losses(accel, trainer, Attention, range(3))
    assert trainer.model.head.weight is trainer.model.embed.weight
    assert trainer.model.head.weight.data_ptr() == trainer.model.embed.weight.data_ptr()


@pytest.mark.parametrize("kind", [Convolutional, Attention])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains_near_the_cpus_fp32(accel, cpu, kind, precision):
    trainer = make(accel, kind, precision=precision, accumulate=2, clip_norm=0.5)
    found = losses(accel, trainer, kind, range(20))
    wanted = losses(cpu, make(cpu, kind, accumulate=2, clip_norm=0.5), kind, range(20))
    assert found == pytest.approx(wanted, rel=0.03)
    assert found != wanted
    assert trainer.skipped == 0


@pytest.mark.parametrize("direction", ["npu to cpu", "cpu to npu"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_run_on_one_device_goes_on_on_the_other(accel, cpu, tmp_path, direction, name, caplog):
    first, second = (accel, cpu) if direction == "npu to cpu" else (cpu, accel)
    options = {"optimizer": name, "accumulate": 2, "clip_norm": 0.5}
    trainer = make(first, Convolutional, **options)
    losses(first, trainer, Convolutional, range(5))  # within a window
    trainer.save(tmp_path)
    caplog.clear()  # `save` reports batches that did not come through the trainer
    resumed = make(second, Convolutional, **options)
    assert resumed.resume(tmp_path) is not None
    found = losses(second, resumed, Convolutional, range(5, 12))
    assert found == pytest.approx(losses(first, trainer, Convolutional, range(5, 12)), abs=1e-6)
    said = (record.getMessage() for record in caplog.records)
    (message,) = (line for line in said if "resumed from" not in line)
    assert "random" in message
    assert "npu" in message


LATE = """
import torch

torch.ones((), requires_grad=True).backward()

import accelcore

try:
    accelcore.select("npu")
except accelcore.AccelError as error:
    print(error)
"""


def test_a_backward_pass_before_torch_npu_was_loaded_is_told_to_the_user(run):
    """torch's autograd engine counts the devices of each kind once, at the first backward pass of any."""
    result = run("-c", LATE, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode == 0, result.stderr
    assert "npu:0 cannot be used" in result.stdout
    assert "backward pass" in result.stdout
    assert "before the first" in result.stdout


TRANSFERRED = """
import warnings

warnings.simplefilter("ignore")

import torch
from torch_npu.contrib import transfer_to_npu

import accelcore

probe = accelcore.installed()["npu"]
accel = accelcore.select("npu")
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
trainer = accel.trainer(model, optimizer, loss=lambda model, batch: model(batch).square().mean(), precision="bf16")
losses = [trainer(torch.ones(4, 2, device="cuda")).item() for _ in range(5)]
print(probe.available, "transfer_to_npu is active" in probe.reason, accel.device, losses[-1] < losses[0])
"""


def test_it_works_where_transfer_to_npu_has_patched_torch(fork, tmp_path):
    (tmp_path / "script.py").write_text(TRANSFERRED)
    result = fork(tmp_path / "script.py").finish()
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "True True npu:0 True"


@pytest.mark.parametrize("pack", [tuple, list, lambda parts: {"batch": list(parts)}], ids=["tuple", "list", "dict"])
def test_a_batch_on_the_host_is_moved_and_trains_alike(accel, pack):
    def loss(model, batch):
        return model(batch["batch"] if isinstance(batch, dict) else batch)

    def trained(place):
        torch.manual_seed(0)
        model = Convolutional()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = accel.trainer(model, optimizer, loss=loss, accumulate=2, weight=lambda _: torch.tensor(3.0))
        found = [trainer(place(pack(Convolutional.batch(step)))).item() for step in range(4)]
        return found, model.state_dict()

    on_device, on_host = trained(accel.runtime.to_device), trained(lambda batch: batch)
    assert on_host[0] == on_device[0]
    torch.testing.assert_close(on_host[1], on_device[1], rtol=0, atol=0)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="an error has no notes")
def test_tensors_in_an_object_that_the_trainer_does_not_know(accel):
    trainer = make(accel, lambda: nn.Linear(4, 1))
    trainer = accel.trainer(trainer.model, trainer.optimizer, loss=lambda model, batch: model(batch.inputs).mean())
    with pytest.raises(RuntimeError, match="same device") as raised:
        trainer(types.SimpleNamespace(inputs=torch.ones(2, 4)))
    assert any("to(device)" in note and "dataclasses" in note for note in raised.value.__notes__)


def test_an_optimizer_that_keeps_the_gradients_of_its_first_step_is_refused(accel):
    from torch_npu import optim

    model = accel.runtime.to_device(nn.Linear(4, 1))
    with pytest.raises(accelcore.ConfigurationError, match=r"NpuFusedAdam(.|\n)*by name"):
        accel.trainer(model, optim.NpuFusedAdam(model.parameters(), lr=0.1))

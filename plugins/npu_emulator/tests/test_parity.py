"""A training recorded on the CPU and replayed on the emulated NPU: sound ones agree, and a fault is named."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
torch_npu = pytest.importorskip("torch_npu")

from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

import accelcore  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "faults"))
parity_faults = import_module("parity_faults")

pytestmark = [
    pytest.mark.usefixtures("emulated_npu"),
    pytest.mark.filterwarnings("ignore:Cannot create tensor with intern?al format"),
]


class Pictures(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(64, 4)
        )


def nothing(step, model, optimizer):
    """Plant no fault."""


def train(device, change=nothing, *, dtype=None):
    torch.manual_seed(0)
    model = Pictures().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, 4):
        change(step, model, optimizer)
        inputs, targets = torch.randn(6, 2, 6, 6), torch.randint(4, (6,))
        optimizer.zero_grad()
        with torch.autocast(torch.device(device).type, dtype, enabled=dtype is not None):
            found = model(inputs.to(device))
        cross_entropy(found.float(), targets.to(device)).backward()
        optimizer.step()


def replayed(folder, change=nothing, *, dtype=None, operators=()):
    with accelcore.Record(folder / "ref", random="everywhere", operators=operators):
        train("cpu", dtype=dtype)
    with accelcore.Replay(folder / "ref") as replay:
        train("npu:0", change, dtype=dtype)
    assert "kind" in [each.name for each in replay.result.settings]
    return replay.result


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_training_with_dropout_agrees_with_its_recording_of_the_cpu(tmp_path, dtype):
    found = replayed(tmp_path, dtype=dtype, operators=[2])
    assert found.agrees, found
    assert found.steps == 3


def statistics(step, model, optimizer):
    if step == 3:
        model[1].running_var.mul_(1.01)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_statistics_that_change_between_two_steps_are_named(tmp_path, dtype):
    found = replayed(tmp_path, statistics, dtype=dtype)
    assert (found.phase, found.step, found.module, found.is_cause) == ("weights", 3, "1", True), found


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_many_planted_faults_are_named(dtype):
    found = parity_faults.counts(parity_faults.cases(range(100), 1, (f"npu {dtype}",)))
    assert found["alarms"] == 0
    assert found["named"] >= 99

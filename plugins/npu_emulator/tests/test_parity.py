"""A training recorded on the CPU and replayed on the emulated NPU: sound ones agree, and a fault is named."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
torch_npu = pytest.importorskip("torch_npu")

from torch import nn
from torch.nn.functional import cross_entropy

import accelcore
from accelcore.torch_features import GET_KERNEL

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "faults"))
parity_faults = import_module("parity_faults")

pytestmark = [
    pytest.mark.skipif(not GET_KERNEL.present, reason=f"refused: torch has no {GET_KERNEL}"),
    pytest.mark.usefixtures("emulated_npu"),
    pytest.mark.filterwarnings("ignore:Cannot create tensor with intern?al format"),
]


class Tagger(nn.Module):
    layer = nn.LSTM

    def __init__(self):
        super().__init__()
        self.tokens, self.lstm = nn.Embedding(16, 8), self.layer(8, 8, batch_first=True)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8, 4)

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):  # oneDNN's has no bf16 on some processors
            found, _ = self.lstm(self.tokens(x))
        return self.head(self.drop(found)).flatten(0, 1)


class GatedTagger(Tagger):
    """Devices compute a GRU by different operators."""

    layer = nn.GRU


class Pictures(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(64, 4)
        )


@pytest.fixture(autouse=True, scope="module")
def _selected():
    """Select the device as a script does: the emulator lacks the kernel that torch_npu alone uses for an LSTM."""
    accelcore.select("npu")


def nothing(step, model, optimizer):
    """Plant no fault."""


def train(kind, device, change=nothing, *, dtype=None):
    accelcore.select(device).precision.prepare(dtype or torch.float32)  # on some processors torch has no LSTM in bf16
    torch.manual_seed(0)
    model = kind().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, 4):
        change(step, model, optimizer)
        inputs = torch.randint(16, (6, 5)) if issubclass(kind, Tagger) else torch.randn(6, 2, 6, 6)
        targets = torch.randint(4, (30 if issubclass(kind, Tagger) else 6,))
        optimizer.zero_grad()
        with torch.autocast(torch.device(device).type, dtype, enabled=dtype is not None):
            found = model(inputs.to(device))
        cross_entropy(found.float(), targets.to(device)).backward()
        optimizer.step()


def replayed(folder, kind, change=nothing, *, dtype=None, operators=()):
    with accelcore.Record(folder / "ref", random="everywhere", operators=operators):
        train(kind, "cpu", dtype=dtype)
    with accelcore.Replay(folder / "ref") as replay:
        train(kind, "npu:0", change, dtype=dtype)
    assert "kind" in [each.name for each in replay.result.settings]
    return replay.result


@pytest.mark.parametrize("kind", [Tagger, GatedTagger, Pictures])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_training_with_dropout_agrees_with_its_recording_of_the_cpu(tmp_path, kind, dtype):
    found = replayed(tmp_path, kind, dtype=dtype, operators=[2])
    assert found.agrees, found
    assert found.steps == 3


def statistics(step, model, optimizer):
    if step == 3:
        model[1].running_var.mul_(1.01)


def head(step, model, optimizer):
    if step == 3:
        with torch.no_grad():
            model.head.weight.add_(1e-3)


def moments(step, model, optimizer):
    if step == 3:
        optimizer.state[model.lstm.weight_hh_l0]["exp_avg"].mul_(1.01)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "fault", "phase", "module"),
    [(Pictures, statistics, "weights", "1"), (Tagger, head, "weights", "head"), (Tagger, moments, "update", "lstm")],
)
def test_what_a_step_begins_with_is_named(tmp_path, dtype, kind, fault, phase, module):
    found = replayed(tmp_path, kind, fault, dtype=dtype)
    assert (found.phase, found.step, found.module, found.is_cause) == (phase, 3, module, True), found


def test_a_module_that_computes_something_else_is_named_with_its_settings(tmp_path):
    def change(step, model, optimizer):
        model.drop.p = 0.5

    found = replayed(tmp_path, Tagger, change, operators=[1])
    assert (found.step, found.module) == (1, "drop"), found
    assert "module drop" in [each.name for each in found.settings]


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_many_planted_faults_are_named(dtype):
    found = parity_faults.counts(parity_faults.cases(range(100), 1, (f"npu {dtype}",)))
    assert found["alarms"] == 0
    assert found["named"] >= 99

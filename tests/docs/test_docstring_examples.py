"""The examples in docstrings, which the reference shows, run and give what they print."""

from __future__ import annotations

from doctest import DocTestFinder, DocTestRunner
from importlib import import_module
from pathlib import Path

import pytest
import torch

import accelcore
import accelcore.checkpoint.export

ROOT = Path(accelcore.__file__).parent
FILES = [path for path in sorted(ROOT.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]
MODULES = [".".join(("accelcore", *path.relative_to(ROOT).with_suffix("").parts)) for path in FILES]
EXAMPLES = {
    example.name.removesuffix(".__init__"): example
    for module in MODULES
    for example in DocTestFinder(exclude_empty=True).find(import_module(module.removesuffix(".__init__")))
    if example.examples
}
MAIN = {
    "select", "trainer", "distributed", "Trainer", "evaluate", "mean", "save", "resume", "create", "fastest", "Policy",
    "LossScale", "FSDP", "Recompute", "Observer", "Progress", "Log", "ShardedStream", "Together", "Job", "Record",
    "Replay", "seed", "export",
}  # fmt: skip


@pytest.fixture
def names():
    """What the examples use and do not make."""
    accel = accelcore.select("cpu")
    made = {"accelcore": accelcore, "torch": torch, "accel": accel}

    def loss(model, batch):
        return model(batch).square().mean()

    def trainer():
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        return accel.trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)

    def train():
        torch.manual_seed(0)
        trainer()(torch.randn(8, 4))

    one = trainer()
    made |= {"loss": loss, "train": train, "trainer": one, "model": one.model, "optimizer": one.optimizer}
    made |= {"other": trainer(), "batch": torch.randn(8, 4)}
    made["loader"] = torch.utils.data.DataLoader(torch.randn(32, 4), 8)
    with accel.distributed() as job:
        yield made | {"job": job}


def test_what_a_user_needs_first_has_an_example():
    assert {name.rpartition(".")[2] for name in EXAMPLES} >= MAIN


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_printed(name, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example, said = EXAMPLES[name], []
    example.globs.clear()
    example.globs.update(names)
    result = DocTestRunner(verbose=False).run(example, out=said.append)
    assert result.attempted
    assert not result.failed, "".join(said)

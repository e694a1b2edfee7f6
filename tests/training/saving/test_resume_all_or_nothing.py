"""A checkpoint that does not fit changes nothing: not a weight, not a random number, not a rate."""

from __future__ import annotations

import copy

import pytest
import torch
from thinned import diagonals
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import accelcore
from accelcore.checkpoint import store


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))

    def forward(self, x):
        return self.body(x)

    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        assert state == {"version": 1}


KINDS = {
    "flat": (lambda accel, p: accel.optimizers.create("adamw", p, lr=0.05), True),
    "per tensor": (lambda accel, p: accel.optimizers.create("adamw", p, lr=0.05), False),
    "torch's fused": (lambda accel, p: torch.optim.AdamW(p, lr=0.05, fused=True), False),
}


def make(accel, kind, **options):
    model = Model()
    create, flat = KINDS[kind]
    optimizer = create(accel, model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=99, cycle_momentum=False)
    trainer = accel.trainer(
        model, optimizer, loss=lambda m, b: mse_loss(m(b[0]), b[1]), scheduler=schedule, accumulate=3, flat=flat,
        **{"loss_scale": "dynamic", "weight": len, **options},
    )  # fmt: skip
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4, shuffle=True, generator=torch.Generator())
    return trainer, loader


def train(trainer, loader, batches):
    losses = []
    for batch in trainer.batches(loader):
        losses.append(trainer(batch).item())
        if len(losses) == batches:
            return losses
    raise AssertionError("too few batches")


def plain(tree):
    if isinstance(tree, Tensor):
        return str(tree.dtype), tree.tolist()
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return [plain(value) for value in tree] if isinstance(tree, list | tuple) else tree


def snapshot(accel, trainer):
    return plain(
        {
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "scaler": trainer.scaler.state_dict(),
            "schedule": trainer.scheduler.state_dict(),
            "random": accel.runtime.rng_state(),
            "gradients": [parameter.grad for parameter in trainer.model.parameters()],
            "place": (trainer.steps, trainer.epoch),
        }
    )


def forge(path, folder, change):
    """A copy of a checkpoint with other contents, and right sums over them."""
    whole = store.Checkpoint(path)
    parts = {name: whole.read(name) for name in whole.manifest["files"]}
    change(parts)
    facts = {key: whole.manifest[key] for key in ("run", "trainers", "world_size", "device", "accelcore", "torch")}
    with store.alone(folder):
        for name, tree in parts.items():
            store.write_file(folder, name, tree)
        store.finish(folder, whole.manifest["steps"], facts)


def put(*way_and_value):
    """Put a value at a place in the parts of a checkpoint; a place that is not there yet is an error of this test."""
    *way, last, value = way_and_value

    def change(parts):
        at = parts
        for key in way:
            at = at[key]
        at[last]  # it is there
        at[last] = value

    return change


def drop(*way):
    def change(parts):
        at = parts
        for key in way[:-1]:
            at = at[key]
        del at[way[-1]]

    return change


WEIGHT = "body.0.weight"
OWN = "rank-00000"
FORGERIES = {
    "a weight of another shape": put("model", WEIGHT, torch.zeros(1)),
    "a weight of integers": put("model", WEIGHT, torch.zeros(4, 3, dtype=torch.int64)),
    "a weight that is none": put("model", WEIGHT, 3),
    "no weight": drop("model", WEIGHT),
    "no model": put("model", []),
    "a moment of one element": put("shared", "optimizer", "state", WEIGHT, "exp_avg", torch.zeros(1)),
    "a moment of no dimension": put("shared", "optimizer", "state", WEIGHT, "exp_avg", torch.zeros(())),
    "a moment that is transposed": put("shared", "optimizer", "state", WEIGHT, "exp_avg", torch.zeros(3, 4)),
    "a moment of integers": put("shared", "optimizer", "state", WEIGHT, "exp_avg", torch.zeros(4, 3).int()),
    "a moment that is none": put("shared", "optimizer", "state", WEIGHT, "exp_avg", "x"),
    "a moment that lacks": drop("shared", "optimizer", "state", WEIGHT, "exp_avg"),
    "a moment too many": lambda parts: parts["shared"]["optimizer"]["state"][WEIGHT].update(extra=torch.zeros(2)),
    "steps below 0": put("shared", "optimizer", "state", WEIGHT, "step", torch.tensor(-1.0)),
    "steps that are no number": put("shared", "optimizer", "state", WEIGHT, "step", torch.tensor(float("nan"))),
    "steps that are a list": put("shared", "optimizer", "state", WEIGHT, "step", [1]),
    "a state of nobody": lambda parts: parts["shared"]["optimizer"]["state"].update(nobody={}),
    "a rate that is none": put("shared", "optimizer", "groups", 0, "lr", "fast"),
    "a rate of nan": put("shared", "optimizer", "groups", 0, "lr", float("nan")),
    "three betas": put("shared", "optimizer", "groups", 0, "betas", (0.1, 0.2, 0.3)),
    "another option": lambda parts: parts["shared"]["optimizer"]["groups"][0].update(momentum=0.9),
    "no groups": put("shared", "optimizer", "groups", []),
    "radam": put("shared", "optimizer", "kind", "radam"),
    "a scale of nan": put("shared", "scaler", "scale", float("nan")),
    "a scale that is none": put("shared", "scaler", "scale", "big"),
    "a tracker below 0": put("shared", "scaler", "_growth_tracker", -1),
    "half a scaler": drop("shared", "scaler", "growth_factor"),
    "a list for a scaler": put("shared", "scaler", [1]),
    "another schedule": put("shared", "schedule", "kind", "StepLR"),
    "a list for a schedule": put("shared", "schedule", "state", [1]),
    "a full window": put(OWN, "window", "micro", 3),
    "another window": put(OWN, "window", "accumulate", 4),
    "micro-batches that are no number": put(OWN, "window", "micro", True),
    "a gradient of another shape": put(OWN, "window", "gradients", WEIGHT, torch.zeros(1)),
    "a gradient of nobody": lambda parts: parts[OWN]["window"]["gradients"].update(nobody=torch.zeros(1)),
    "a buffer of another shape": put(OWN, "window", "buffers", "body.1.running_mean", torch.zeros(1)),
    "a weight of two elements": put(OWN, "window", "total", torch.ones(2)),
    "a unit that is none": put(OWN, "window", "unit", "rows"),
    "batches below 0": put(OWN, "data", "taken", -1),
    "a loader of another kind": put(OWN, "data", "form", 3),
    "an epoch that is none": put(OWN, "data", "epoch", 1.5),
    "a start of numbers": put(OWN, "data", "start", {"torch": 1}),
    "a start of two bytes": put(OWN, "data", "start", {"torch": torch.zeros(2, dtype=torch.uint8)}),
    "a generator that is none": put(OWN, "data", "generators", [7]),
    "a list for a stream": put(OWN, "data", [1]),
    "a random state of two bytes": put(OWN, "random", "torch", torch.zeros(2, dtype=torch.uint8)),
    "a random state of rubbish": put(OWN, "random", "python", torch.arange(7)),
    "a random state that is none": put(OWN, "random", "torch", 5),
    "no random state of torch": drop(OWN, "random", "torch"),
    "a list for random states": put(OWN, "random", []),
    "a master of another shape": put("shared", "masters", {WEIGHT: torch.zeros(1)}),
}


@pytest.mark.parametrize(("what", "kind"), diagonals(FORGERIES, KINDS))
def test_a_forged_checkpoint_is_refused_and_changes_nothing(accel, tmp_path, kind, what):
    trainer, loader = make(accel, kind)
    train(trainer, loader, 4)  # a step, and a window that is open
    forge(trainer.save(tmp_path / "whole"), tmp_path / "forged", FORGERIES[what])
    train(trainer, loader, 1)
    before = snapshot(accel, trainer)
    with pytest.raises(accelcore.CheckpointError):
        trainer.resume(tmp_path / "forged")
    assert snapshot(accel, trainer) == before
    assert trainer.resume(tmp_path / "whole") is not None
    assert snapshot(accel, trainer) != before


@pytest.mark.parametrize(("saved", "resumed"), [("radam", "adam"), ("adam", "nadam"), ("adamw", "adam")])
@pytest.mark.parametrize("theirs", [False, True])
def test_another_optimizer_is_refused(accel, tmp_path, saved, resumed, theirs):
    classes = {"radam": torch.optim.RAdam, "adam": torch.optim.Adam, "nadam": torch.optim.NAdam,
               "adamw": torch.optim.AdamW}  # fmt: skip

    def trainer(name):
        model = nn.Linear(2, 1)
        made = classes[name](model.parameters()) if theirs else accel.optimizers.create(name, model.parameters())
        return accel.trainer(model, made, loss=lambda m, b: m(b).sum())

    first, other = trainer(saved), trainer(resumed)
    first(torch.ones(1, 2))
    first.save(tmp_path)
    before = copy.deepcopy(other.model.state_dict())
    with pytest.raises(accelcore.CheckpointError, match="another optimizer"):
        other.resume(tmp_path)
    assert not other.optimizer.state
    assert all(torch.equal(value, other.model.state_dict()[name]) for name, value in before.items())


@pytest.mark.parametrize(("saved", "resumed"), [("fp16", "bf16"), ("bf16", "fp16"), ("fp16", "fp32")])
def test_another_precision_resumes_between_windows_and_says_what_becomes_of_the_scale(
    accel, tmp_path, caplog, saved, resumed
):
    first, loader = make(accel, "flat", precision=saved, loss_scale=None)
    train(first, loader, 3)
    first.save(tmp_path)
    second, loader = make(accel, "flat", precision=resumed, loss_scale=None)
    second.resume(tmp_path)
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert second.steps == 1
    train(second, loader, 3)
    assert "loss scale" in caplog.text


def test_a_list_of_fp32_masters_of_ones_own_can_be_saved_or_is_refused_by_name(accel, tmp_path):
    """Parameters in the optimizer that are not the model's, such as masters made by hand."""
    model = nn.Linear(2, 1).bfloat16()
    masters = [nn.Parameter(parameter.detach().float()) for parameter in model.parameters()]
    with pytest.raises(accelcore.ConfigurationError, match="not in the model"):
        accel.trainer(model, torch.optim.SGD(masters, lr=0.1))
    trainer = accel.trainer(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.param_groups[0]["params"] = masters
    with pytest.raises(accelcore.AccelError):
        trainer.save(tmp_path)
    with pytest.raises(accelcore.AccelError):
        trainer.resume(tmp_path)

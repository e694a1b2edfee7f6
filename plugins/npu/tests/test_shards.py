"""Two ranks divide a model among two emulated NPUs, over the emulated hccl; the reference is one process on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from subjects.shards import STEPS, Block, loss, made, rows_of
from torch import nn

import accelcore


@pytest.fixture(scope="module")
def ranks(job):
    found = job("shards.py")
    assert all(rank["emulated"] for rank in found)
    return found


def reference(clip=None):
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            (loss(model, rows_of(rank, step)) / 2).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: value.flatten() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("way", "clip"),
    [*((way, None) for way in ("fsdp", "torch", "zero2", "anew", "away", "offloaded", "resumed")), ("clipped", 0.1)],
)
def test_divided_models_train_as_one_process_on_the_cpu(ranks, way, clip):
    for rank in ranks:
        for name, value in reference(clip).items():
            torch.testing.assert_close(torch.tensor(rank[way][name]), value, rtol=1e-4, atol=1e-5, msg=name)


def test_statistics_are_of_the_rows_of_all_ranks(ranks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, torch.cat([rows_of(rank, step) for rank in range(2)])).backward()
        optimizer.step()
    for rank in ranks:
        for name, value in model.state_dict().items():
            found = torch.tensor(rank["statistics"][name])
            torch.testing.assert_close(found, value.flatten().float(), rtol=1e-4, atol=1e-4, msg=name)


def test_bf16_is_near(ranks):
    for rank in ranks:
        for name, value in reference().items():
            torch.testing.assert_close(torch.tensor(rank["bf16"][name]), value, rtol=0.1, atol=0.06, msg=name)


def test_each_rank_holds_its_share_on_its_device(ranks):
    whole = sum(parameter.numel() for parameter in made().parameters())
    assert sum(rank["held"] for rank in ranks) == whole
    assert [rank["where"] for rank in ranks] == [["npu:0"], ["npu:1"]]
    assert ranks[0]["route"] not in ("npu", "native"), "the vendor's kernel takes flat memory, which shards are not in"


class Dropped(nn.Module):
    """Dropout on the device, also where a part is given everything by name."""

    def __init__(self):
        super().__init__()
        self.blocks, self.drop = nn.ModuleList(Block() for _ in range(2)), nn.Dropout(0.5)
        self.parts = nn.ModuleList(_Drops(block) for block in self.blocks)

    def forward(self, rows):
        for part in self.parts:
            rows = part(rows=rows)
        return rows


class _Drops(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block, self.drop = block, nn.Dropout(0.5)

    def forward(self, *, rows):
        return self.drop(self.block(self.drop(rows)))


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint": _Drops},
        {"checkpoint": accelcore.Recompute(_Drops, save=[torch.ops.aten.addmm.default])},
        {"offload": _Drops},
        {"checkpoint": _Drops, "offload": _Drops},
        {"checkpoint": _Drops, "precision": "bf16"},
        {"checkpoint": _Drops, "precision": "O1"},
    ],
    ids=str,
)
def test_dropout_and_gradients_are_those_without(options):
    accel = accelcore.select("npu")
    assert accel.emulated
    start = Dropped()
    ends = []
    for given in ({key: options[key] for key in options if key == "precision"}, options):
        accel.runtime.seed(3)
        model = copy.deepcopy(start)
        optimizer = accel.optimizers.create("adamw", model.parameters(), lr=0.05)
        trainer = accel.trainer(model, optimizer, loss=loss, **given)
        losses = [trainer(rows_of(0, step).to(accel.device)).item() for step in range(3)]
        ends.append((losses, {name: value.cpu() for name, value in model.state_dict().items()}))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(value, ends[1][1][name]) for name, value in ends[0][1].items())

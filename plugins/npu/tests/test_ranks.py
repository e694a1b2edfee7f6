"""Two ranks on two emulated NPUs, over the emulated hccl; the reference is one process on the CPU with all the rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

ROWS, STEPS = 8, 10


@pytest.fixture(scope="module")
def ranks(job):
    found = job("ranks.py")
    assert all(rank["emulated"] for rank in found)
    return found


def reference(accumulate=1, clip_norm=None):
    """Mean losses and final parameters of the same training by plain torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        inputs = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        (loss / accumulate).backward()
        losses.append(loss.item())
        if (step + 1) % accumulate == 0:
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
    return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def test_each_rank_has_its_own_device(ranks):
    assert [(rank["rank"], rank["index"], rank["current"]) for rank in ranks] == [(0, 0, 0), (1, 1, 1)]


def test_npu_tensors_go_by_hccl_and_the_hosts_by_gloo(ranks):
    for rank in ranks:
        assert "npu:hccl" in rank["config"]
        assert "cpu:gloo" in rank["config"]
        assert rank["group"] == [1]


def test_accumulated_and_clipped_it_trains_as_one_process_on_the_cpu(ranks):
    losses, values = reference(accumulate=2, clip_norm=0.5)
    for number, rank in enumerate(ranks):
        assert rank["accumulated"]["devices"] == [f"npu:{number}"]
        assert rank["accumulated"]["losses"] == pytest.approx(losses, abs=1e-6)
        assert rank["accumulated"]["values"] == pytest.approx(values, abs=1e-5)


def test_ddp_in_bf16_trains_near_fp32(ranks):
    losses, _ = reference()
    for rank in ranks:
        assert rank["bf16"]["losses"] == pytest.approx(losses, rel=0.05)
        assert rank["bf16"]["losses"] != losses


@pytest.mark.parametrize("training", ["bf16", "fp16", "combined fp16"])
def test_training_in_low_precision_keeps_the_ranks_equal(ranks, training):
    one, other = (rank[training] for rank in ranks)
    assert one["values"] == other["values"]
    assert one["skipped"] == other["skipped"] < 3
    assert len(set(one["losses"])) == STEPS
    assert all(math.isfinite(value) for value in one["losses"] + one["values"])


def test_fully_shard_trains_as_one_process_on_the_cpu(ranks):
    losses, _ = reference()
    for rank in ranks:
        sharded = rank["sharded"]
        assert sharded["losses"] == pytest.approx(losses, abs=1e-6)
        assert sharded["local"] < sharded["whole"]
        assert sharded["route"] != "npu_fused", "the flat layout would gather what is sharded"


def test_the_job_is_left_at_the_end(ranks):
    assert all(rank["left"] for rank in ranks)


def test_a_group_formed_for_hccl_alone_is_given_gloo_for_the_host_and_left_standing(ranks):
    for rank in ranks:
        assert rank["adopted"] == {"host": [1], "device": [2.0], "backend": "gloo", "still": True}


def test_a_rank_that_stays_away_is_named_when_the_timeout_is_up(job):
    told, _ = job("absent.py")
    assert told["limit"] == "2"
    assert "HcclAllReduce" in told["error"]
    assert told["error"].endswith("waiting for rank 1")


# Parts that clamp overflow and raise a flag: no gradient is ever inf there.


@pytest.fixture(scope="module")
def saturating_ranks(job):
    return job("saturation.py", ACCEL_EMULATED_SOC="Ascend910A")


def test_a_part_that_saturates_declares_its_flag_and_neither_bf16_nor_hf32(saturating_ranks):
    for rank in saturating_ranks:
        assert rank["declared"] == [True, None, ["float16"], ["float32", "float16"]]


def test_an_overflow_on_one_rank_skips_the_step_on_all(saturating_ranks):
    for rank in saturating_ranks:
        assert rank["skipped"] == {"finite": True, "weight": 1.0, "scale": 512.0}
        assert rank["after"] == {"finite": True, "weight": 0.75, "scale": 512.0}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_overflow_elsewhere_leaves_clipping_as_it_is(saturating_ranks, precision):
    for rank in saturating_ranks:
        assert rank["clipped"][precision] == pytest.approx([1.0, 1.0], rel=1e-3)


def test_an_overflow_before_the_window_does_not_count(saturating_ranks):
    for rank in saturating_ranks:
        assert rank["before"] == {"finite": True, "weight": 0.5, "scale": 512.0}

"""Scripts in Ascend's style train on the emulated NPU as they do in plain fp32 without apex, on the CPU."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from accelcore import precision
from accelcore.apex import amp, optimizers

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "apex"))
import rewritten

TOLERANCE = 6e-3  # of a few steps in half precision, in losses around 1
RUNS = [
    ("train_resnet.py", "O1", ("--loss-scale", "dynamic", "--combine-grad")),
    ("train_resnet.py", "O2", ("--loss-scale", "128.0", "--combine-grad")),
    ("train_resnet.py", "O3", ()),
    (
        "pretrain_bert.py",
        "O1",
        (
            "--loss-scale",
            "128.0",
        ),
    ),
    ("pretrain_bert.py", "O2", ("--two-losses", "--combine-grad")),
    ("train_gan.py", "O1", ("--combine-grad",)),
    ("train_gan.py", "O2", ("--loss-scale", "128.0", "--num-losses", "1")),
    ("train_gan.py", "O3", ("--loss-scale", "dynamic")),
]
ON_RANKS = [
    ("train_resnet.py", ("--opt-level", "O2")),  # by torch's wrapper
    ("pretrain_bert.py", ("--opt-level", "O1", "--combine-ddp")),
]


@pytest.fixture(autouse=True)
def _as_before():
    yield
    amp.reset()
    precision.reset()


@cache
def in_fp32(script):
    return rewritten.run(script)


def close(found, exact):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(exact), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("script", "level", "options"), RUNS, ids=str)
def test_a_script_trains_as_in_fp32_without_apex(script, level, options):
    exact = in_fp32(script)
    found = rewritten.run(script, "--device", "npu:0", "--amp", "--opt-level", level, *options)
    for key in {"losses", "norms"} & set(exact):
        close(found[key], exact[key])
    assert found.get("top1") == exact.get("top1")


@pytest.mark.full  # one rank: above; two ranks on the CPU: tests/apex
@pytest.mark.parametrize(("script", "options"), ON_RANKS, ids=str)
def test_two_ranks_train_as_in_fp32_without_apex(fork_ranks, tmp_path, script, options):
    runs = json.dumps([(script,), (script, "--device", "npu:RANK", "--amp", *options)])
    ended = [each.finish() for each in fork_ranks(rewritten.__file__, tmp_path, runs, DIST_BACKEND="npu:hccl,cpu:gloo")]
    assert [each.returncode for each in ended] == [0, 0], "\n".join(each.stderr for each in ended)
    for rank in range(2):
        exact, found = json.loads(Path(tmp_path, f"rank-{rank}.json").read_text())
        close(found["losses"], exact["losses"])


def test_an_optimizer_made_on_the_host_takes_the_devices_route_when_it_was_moved():
    model = nn.Linear(4, 4)
    optimizer = optimizers.NpuFusedAdamW(model.parameters(), lr=0.1)
    on_host = optimizer.route
    model.to("npu:0")
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0)
    with amp.scale_loss(model(torch.ones(2, 4, device="npu:0")).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    on_device = optimizers.NpuFusedAdamW([nn.Parameter(torch.ones(4, device="npu:0"))]).route
    assert optimizer.route == on_device != on_host
    assert all(value.device.type == "npu" for entry in optimizer.state.values() for value in (entry["exp_avg"],))


def test_an_overflow_skips_once_and_lowers_the_scale():
    model = nn.Linear(2, 1, bias=False).to("npu:0")
    nn.init.ones_(model.weight)
    model, optimizer = amp.initialize(
        model, optimizers.NpuFusedSGD(model.parameters(), lr=0.5), dynamic_init_scale=64.0, verbosity=0
    )
    x = torch.tensor([[1.0, 2.0]], device="npu:0")
    for overflows in (True, False):
        optimizer.zero_grad()
        with amp.scale_loss((model(x) * (float("inf") if overflows else 1.0)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 32.0
    assert model.weight.tolist() == [[0.5, 0.0]]

"""Scripts in Ascend's style, changed in their import lines only, train as they do in plain fp32 without apex."""

from __future__ import annotations

from functools import cache

import pytest
import rewritten
import torch

from accelcore.apex import amp

# Half precision rounds to 2**-11; what a few steps make of that in losses around 1, with room.
TOLERANCE = {"O0": 1e-5, "O1": 2e-3, "O2": 6e-3, "O3": 6e-3}

VARIANTS = [
    ("train_resnet.py", "O0", ()),
    ("train_resnet.py", "O1", ("--loss-scale", "dynamic", "--combine-grad")),
    ("train_resnet.py", "O1", ("--loss-scale", "128.0")),
    ("train_resnet.py", "O2", ()),
    ("train_resnet.py", "O2", ("--loss-scale", "128.0", "--combine-grad")),
    ("train_resnet.py", "O2", ("--keep-batchnorm-fp32", "False")),
    ("train_resnet.py", "O3", ("--keep-batchnorm-fp32", "True")),
    ("train_resnet.py", "O3", ("--loss-scale", "dynamic")),
    ("pretrain_bert.py", "O0", ("--two-losses",)),
    ("pretrain_bert.py", "O1", ()),
    ("pretrain_bert.py", "O1", ("--loss-scale", "128.0", "--two-losses", "--combine-grad")),
    ("pretrain_bert.py", "O2", ("--two-losses",)),
    ("pretrain_bert.py", "O2", ("--loss-scale", "128.0", "--combine-grad")),
    ("pretrain_bert.py", "O3", ("--loss-scale", "128.0", "--two-losses")),
    ("train_gan.py", "O0", ("--num-losses", "1")),
    ("train_gan.py", "O1", ("--loss-scale", "128.0", "--num-losses", "1")),
    ("train_gan.py", "O1", ("--combine-grad",)),
    ("train_gan.py", "O2", ("--combine-grad", "--num-losses", "1")),
    (
        "train_gan.py",
        "O2",
        (
            "--loss-scale",
            "128.0",
        ),
    ),
    ("train_gan.py", "O3", ()),
]


@cache
def in_fp32(script):
    return rewritten.run(script)


@pytest.mark.parametrize(("script", "level", "options"), VARIANTS, ids=lambda value: str(value))
def test_a_script_trains_as_in_fp32_without_apex(script, level, options):
    exact, found = in_fp32(script), rewritten.run(script, "--amp", "--opt-level", level, *options)
    for key in {"losses", "norms"} & set(exact):
        torch.testing.assert_close(
            torch.tensor(found[key]), torch.tensor(exact[key]), rtol=TOLERANCE[level], atol=TOLERANCE[level]
        )
    assert found.get("top1") == exact.get("top1")
    for name, value in exact["state"].items():
        torch.testing.assert_close(torch.tensor(found["state"][name]), torch.tensor(value), rtol=0.05, atol=0.03)


@pytest.mark.parametrize("name", ["NpuFusedLamb", "NpuFusedBertAdam"])
def test_the_optimizers_that_torch_lacks_train_at_every_level_alike(name):
    exact = rewritten.run("pretrain_bert.py", "--amp", "--optimizer", name, "--opt-level", "O0")["losses"]
    assert exact[-1] < exact[0]
    for level in ("O1", "O2"):
        amp.reset()
        found = rewritten.run("pretrain_bert.py", "--amp", "--optimizer", name, "--opt-level", level, "--combine-grad")
        torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(exact), rtol=0.01, atol=0.01)


@pytest.mark.parametrize(("losses", "scales"), [(3, [2.0**15, 2.0**16, 2.0**16]), (1, [2.0**15])])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_of_several_losses_the_one_that_overflows_has_its_scale_lowered_and_its_optimizer_skips(level, losses, scales):
    steps = ("--steps", "1", "--explode", "0")
    before = rewritten.run("train_gan.py", "--steps", "0")["state"]
    found = rewritten.run("train_gan.py", "--amp", "--opt-level", level, "--num-losses", str(losses), *steps)
    assert found["scales"] == scales
    for name, value in found["state"].items():
        if "running" in name or "tracked" in name:
            continue
        same = torch.equal(torch.tensor(value).half(), torch.tensor(before[name]).half())
        assert same == name.startswith("D."), name  # that of D skips, that of G does not

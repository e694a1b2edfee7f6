"""Saved at one level, restored at another."""

from __future__ import annotations

import itertools
import logging

import pytest
import rewritten
import torch
from torch import nn

from accelcore.apex import amp, optimizers

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def made(level, kind="ours", losses=1):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    create = optimizers.NpuFusedAdam if kind == "ours" else torch.optim.Adam
    optimizer = create(model.parameters(), lr=1e-2, eps=1e-3)  # fp16 has no 1e-8
    return amp.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", num_losses=losses, dynamic_init_scale=64.0, verbosity=0
    )


def train(model, optimizer, losses, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        with amp.scale_loss(model(X).square().mean(), optimizer, loss_id=step % losses) as scaled:
            scaled.backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["ours", "torch's"])
@pytest.mark.parametrize(
    ("saved_at", "restored_at", "losses"),
    [*((a, b, 1) for a, b in itertools.product(("O0", "O1", "O2", "O3"), repeat=2)), ("O1", "O2", 2), ("O2", "O1", 2)],
)
def test_a_restored_model_gives_what_the_saved_one_gave(kind, saved_at, restored_at, losses):
    model, optimizer = made(saved_at, kind, losses)
    train(model, optimizer, losses)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
    assert {value.dtype for value in state["model"].values()} == {torch.float32, torch.int64}
    expected = model.eval()(X).float()
    amp.reset()

    model, optimizer = made(restored_at, kind, losses)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    amp.load_state_dict(state["amp"])
    assert amp.state_dict() == state["amp"]
    torch.testing.assert_close(model.eval()(X).float(), expected, rtol=4e-3, atol=4e-3)
    for entry in optimizer.state_dict()["state"].values():
        assert int(entry["step"]) == 3
        wide = torch.float32 if restored_at != "O3" or kind == "ours" else torch.float16
        assert entry["exp_avg"].dtype == wide
    for master, parameter in zip(amp.master_params(optimizer), model.parameters(), strict=True):
        torch.testing.assert_close(master.float(), parameter.float(), rtol=0, atol=1e-3)
    train(model.train(), optimizer, losses, steps=1)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_script_that_resumes_goes_on_as_if_it_had_not_stopped(tmp_path, level):
    def run(*arguments):
        try:
            return rewritten.run("train_resnet.py", "--amp", "--opt-level", level, *arguments)
        finally:
            amp.reset()

    run("--steps", 3, "--save", tmp_path / "half.pt")
    run("--steps", 3, "--resume", tmp_path / "half.pt", "--save", tmp_path / "whole.pt")
    saved = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert saved["amp"]["loss_scaler0"] == {"loss_scale": 2.0**16, "unskipped": 6}
    assert saved["scheduler"]["last_epoch"] == 6
    assert len(saved["optimizer"]["state"]) == len(saved["optimizer"]["param_groups"][0]["params"])


def test_a_scale_with_no_counterpart_is_dropped_and_that_is_said(caplog):
    made("O2", losses=2)
    saved = amp.state_dict()
    made("O1")
    with caplog.at_level(logging.WARNING, "accelcore"):
        amp.load_state_dict(saved)
    assert "2 loss scales, and this run 1" in caplog.text

"""What torch says of the NPU is what the plugin declares by hand, but for what only its authors can know."""

from __future__ import annotations

import pytest
import torch

from accelcore.roles import from_torch


@pytest.fixture(scope="module")
def found():
    return from_torch("npu")


def test_trials_find_what_is_declared_by_hand(accel, found):
    ours, by_hand = found.capabilities, accel.capabilities
    for field in ("process_groups", "parallel", "sync_batchnorm", "streams", "pinned_memory"):
        assert getattr(ours, field) == getattr(by_hand, field), field
    for field in ("autocast_dtypes", "model_dtypes"):
        assert set(getattr(ours, field)) == set(getattr(by_hand, field)), field


def test_it_trains_as_the_plugin(accel, found):
    losses = []
    for backend in (accel, found):
        backend.runtime.seed(1)
        model = torch.nn.Linear(4, 1)
        optimizer = backend.optimizers.create("adamw", model.parameters(), lr=0.01)
        trainer = backend.trainer(
            model, optimizer, loss=lambda m, batch: m(batch).square().mean(), precision="bf16", clip_norm=1.0
        )
        losses.append([float(trainer(torch.ones(3, 4) * number)) for number in range(5)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_its_own_generator_is_saved_and_restored(found):
    found.runtime.seed(5)
    state = found.runtime.rng_state()
    first = torch.rand(4, device=found.device).cpu()
    assert found.runtime.set_rng_state(state) == []
    assert torch.rand(4, device=found.device).cpu().equal(first)

"""The state of loss scalers: ours, torch's and apex's; static scales, none, and what is refused."""

from __future__ import annotations

import pytest
import torch

from accelcore.errors import CheckpointError, ConfigurationError, TrainingError
from tests.scaling.scaled_steps import INF, NAN, in_use, parameter


def test_the_state_is_torchs_and_a_count_of_skipped_steps(accel):
    state = accel.scaler.create(init=512.0, growth=4.0, backoff=0.25, interval=7).state_dict()
    oracle = torch.amp.GradScaler("cpu", init_scale=512.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    assert state == {**oracle.state_dict(), "skipped": 0, "dynamic": True, "version": 1}


def test_a_state_with_more_in_it_is_taken(accel):
    scaler = accel.scaler.create()
    state = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=5).state_dict()
    scaler.load_state_dict({**state, "_growth_tracker": 3, "dynamic": True})
    assert scaler.state_dict() == {**state, "_growth_tracker": 3, "skipped": 0, "dynamic": True, "version": 1}


@pytest.mark.parametrize(("stored", "taken"), [(0.0, 1.0), (2.0**40, 2.0**24), (3.0, 3.0)])
def test_a_stored_scale_is_brought_within_the_bounds_with_a_warning(accel, caplog, stored, taken):
    scaler = accel.scaler.create()
    scaler.load_state_dict({**scaler.state_dict(), "scale": stored})
    assert scaler.state_dict()["scale"] == taken
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (stored != taken)


@pytest.mark.parametrize("key", ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"])
def test_a_state_that_lacks_something_is_refused_by_name(accel, key):
    scaler = accel.scaler.create()
    state = scaler.state_dict()
    with pytest.raises(CheckpointError, match=rf"lacks {key}\Z"):
        accel.scaler.create().load_state_dict({k: value for k, value in state.items() if k != key})
    with pytest.raises(CheckpointError, match="lacks"):
        scaler.load_state_dict({})
    assert scaler.state_dict() == state


@pytest.mark.parametrize(
    "damage",
    [
        {"scale": NAN},
        {"scale": "big"},
        {"scale": -4.0},
        {"scale": None},
        {"growth_factor": 0.5},
        {"backoff_factor": 2.0},
        {"growth_interval": 0},
        {"growth_interval": 2.5},
        {"growth_factor": "2"},
        {"_growth_tracker": -1},
        {"_growth_tracker": 2**31},
        {"_growth_tracker": True},
        {"_growth_tracker": 1.5},
        {"_growth_tracker": NAN},
        {"skipped": -1},
        {"skipped": 2**80},
        {"skipped": "many"},
        {"scale": True},
        {"scale": 10**400},
        {"scale": INF},
    ],
    ids=str,
)
def test_an_invalid_state_is_refused_and_changes_nothing(accel, damage):
    scaler = accel.scaler.create(init=512.0, growth=4.0, backoff=0.25, interval=7)
    state = scaler.state_dict()
    with pytest.raises(CheckpointError):
        scaler.load_state_dict({**accel.scaler.create().state_dict(), **damage})
    assert scaler.state_dict() == state


def test_a_static_scaler_refuses_to_unscale_twice(accel):
    scaler, weight = in_use(accel.scaler.create(init=8.0, dynamic=False)), parameter()
    optimizer = torch.optim.SGD([weight], lr=0.5)
    weight.grad = torch.tensor([8.0, 16.0])
    scaler.unscale_(optimizer)
    with pytest.raises(TrainingError, match="unscale_ was called twice"):
        scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [1.0, 2.0]
    scaler.step(optimizer)
    scaler.update()
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [0.125, 0.25]


def test_a_static_scale_is_taken_back_and_no_other_state_for_it(accel):
    scaler = accel.scaler.create(init=8.0, dynamic=False)
    scaler.load_state_dict(accel.scaler.create(init=8, dynamic=False).state_dict())
    for state in ({}, accel.scaler.create().state_dict()):
        with pytest.raises(CheckpointError, match="this training has a static one"):
            scaler.load_state_dict(state)
    for scale in (32.0, NAN, "big", None):
        with pytest.raises(CheckpointError, match=f"saved with loss_scale={scale}, and this training has 8.0"):
            scaler.load_state_dict({"scale": scale, "dynamic": False})
    assert scaler.state_dict()["scale"] == 8.0
    assert scaler.scale(torch.tensor(2.0)).item() == 16.0


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_state_of_a_later_version_is_refused(accel, dynamic):
    scaler = accel.scaler.create(init=8.0, dynamic=dynamic)
    with pytest.raises(CheckpointError, match="version 2"):
        scaler.load_state_dict({**scaler.state_dict(), "version": 2})


def test_which_states_each_kind_takes(accel):
    kinds = {"none": accel.scaler.none(), "static": accel.scaler.create(init=8.0, dynamic=False)}
    kinds["dynamic"] = accel.scaler.create()
    states = {name: scaler.state_dict() for name, scaler in kinds.items()}
    states |= {"torch's": torch.amp.GradScaler("cpu").state_dict(), "another static": {"scale": 4.0, "dynamic": False}}
    states |= {"apex's": {"loss_scale": 8.0, "unskipped": 0}}
    taken = {name: {kind for kind, scaler in kinds.items() if scaler.takes(state)} for name, state in states.items()}
    assert taken == {
        "none": {"none"},
        "static": {"static"},
        "dynamic": {"dynamic"},
        "torch's": {"dynamic"},
        "another static": set(),
        "apex's": {"static", "dynamic"},
    }
    for name, (*_, kind) in ((name, (None, *sorted(kinds))) for name, kinds in taken.items() if kinds):
        kinds[kind].load_state_dict(states[name])


def test_no_scaler_leaves_everything_as_it_is(accel):
    scaler, weight = accel.scaler.none(), parameter(1.0, -2.0)
    loss = weight.sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [1.0, 1.0]
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.5, -2.5]
    assert scaler.state_dict() == {}
    assert scaler.skipped == 0
    theirs = torch.amp.GradScaler("cpu", enabled=False)
    assert (scaler.get_scale(), scaler.is_enabled()) == (theirs.get_scale(), theirs.is_enabled())
    scaler.load_state_dict({})
    for state in (accel.scaler.create().state_dict(), {"scale": 8.0}):
        with pytest.raises(CheckpointError, match="this training has none"):
            scaler.load_state_dict(state)


@pytest.mark.parametrize(
    "options",
    [
        {"init": 0.0},
        {"init": -1.0},
        {"init": NAN},
        {"init": INF},
        {"init": 0.5},
        {"init": 2.0**25},
        {"growth": 1.0},
        {"growth": 0.5},
        {"growth": NAN},
        {"growth": INF},
        {"backoff": 0.0},
        {"backoff": 1.0},
        {"backoff": 2.0},
        {"backoff": NAN},
        {"interval": 0},
        {"interval": -1},
        {"interval": 1.5},
        {"interval": NAN},
        {"min": 0.0},
        {"min": -1.0},
        {"min": NAN},
        {"max": NAN},
        {"max": INF},
        {"min": 2.0**17},
        {"init": 0.0, "dynamic": False},
        {"init": -8.0, "dynamic": False},
        {"init": NAN, "dynamic": False},
        {"init": INF, "dynamic": False},
    ],
    ids=str,
)
def test_a_scaler_that_could_never_work_is_refused(accel, options):
    with pytest.raises(ConfigurationError) as caught:
        accel.scaler.create(**options)
    assert caught.value.remedy
    assert str(next(iter(options.values()))) in caught.value.what


def test_a_static_scale_may_lie_outside_the_dynamic_bounds(accel):
    assert accel.scaler.create(init=0.25, dynamic=False).state_dict()["scale"] == 0.25
    assert accel.scaler.create(init=2**30, dynamic=False).state_dict()["scale"] == 2.0**30


def test_apexs_state_is_taken_as_far_as_it_goes(accel):
    scaler = accel.scaler.create(interval=3, growth=4.0)
    scaler.load_state_dict({"loss_scale": 512.0, "unskipped": 2})
    state = scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (512.0, 2)
    assert (state["growth_interval"], state["growth_factor"]) == (3, 4.0)
    static = accel.scaler.create(init=128.0, dynamic=False)
    static.load_state_dict({"loss_scale": 128.0, "unskipped": 0})
    with pytest.raises(CheckpointError, match=r"loss_scale=64\.0"):
        static.load_state_dict({"loss_scale": 64.0, "unskipped": 0})


@pytest.mark.parametrize("settings", [{}, {"dynamic": False}, None])
def test_update_says_that_it_takes_no_scale_as_torchs_does(accel, settings):
    scaler = accel.scaler.none() if settings is None else accel.scaler.create(**settings)
    with pytest.raises(ConfigurationError, match=r"2\.0.*\n.*init="):
        scaler.update(2.0)


def test_the_scale_can_be_set_as_the_refusal_says(accel):
    scaler = accel.scaler.create()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    assert scaler.get_scale() == 2.0

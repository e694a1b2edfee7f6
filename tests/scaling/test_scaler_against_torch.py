"""The dynamic loss scale against torch's own scaler, step by step: scale, growth, weights."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import accelcore
from tests.scaling.scaled_steps import INF, NAN, Side

# torch's knows no bounds, so it is put back within ours after each step.

numbers = st.sampled_from([0.0, 1.0, -3.0, 1e-6, 0.37, 100.0])
overflows = st.tuples(st.sampled_from([INF, -INF, NAN]), st.integers(0, 3))


class AgainstTorch(RuleBasedStateMachine):
    """The scale, the tracker and the weights of torch.amp.GradScaler, over any sequence of steps."""

    @initialize(
        kind=st.sampled_from(["sgd", "sgd fused", "adam", "adamw fused", "adagrad fused"]),
        init=st.sampled_from([1.0, 8.0, 1000.0, 65536.0]),
        growth=st.sampled_from([2.0, 1.5, 16.0]),
        backoff=st.sampled_from([0.5, 0.1]),
        interval=st.integers(1, 5),
        low=st.sampled_from([2.0**-10, 1.0]),
        high=st.sampled_from([65536.0, 2.0**24]),
    )
    def begin(self, kind, init, growth, backoff, interval, low, high):
        self.low, self.high, self.skipped = low, high, 0
        accel = accelcore.select("cpu")
        self.options = {"init": init, "growth": growth, "backoff": backoff, "interval": interval}
        self.make = lambda: accel.scaler.create(**self.options, min=low, max=high)
        oracle = torch.amp.GradScaler(
            "cpu", init_scale=init, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
        )
        self.ours, self.theirs = Side(self.make(), kind), Side(oracle, kind)
        assert oracle.scale(torch.tensor(1.0)).item() == init  # torch's scaler starts at the first loss

    def both(self, gradients, *, unscale):
        self.ours.step(gradients, unscale=unscale)
        self.theirs.step(gradients, unscale=unscale)
        scale = self.theirs.scaler.get_scale()
        if not self.low <= scale <= self.high:
            self.theirs.scaler.update(new_scale=min(max(scale, self.low), self.high))

    @rule(values=st.lists(numbers, min_size=4, max_size=4), unscale=st.booleans())
    def clean(self, values, unscale):
        self.both((values[:3], values[3:]), unscale=unscale)

    @rule(values=st.lists(numbers, min_size=4, max_size=4), overflow=overflows, unscale=st.booleans())
    def overflow(self, values, overflow, unscale):
        values[overflow[1]] = overflow[0]
        before = [weight.tolist() for weight in self.ours.weights]
        self.both((values[:3], values[3:]), unscale=unscale)
        self.skipped += 1
        assert [weight.tolist() for weight in self.ours.weights] == before

    @rule()
    def resume_in_a_new_scaler(self):
        state = json.loads(json.dumps(self.ours.scaler.state_dict()))
        self.ours.scaler = self.make()
        self.ours.scaler.load_state_dict(state)

    @rule()
    def resume_from_torchs_state(self):
        self.ours.scaler = self.make()
        self.ours.scaler.load_state_dict(self.theirs.scaler.state_dict())
        self.skipped = 0

    @rule()
    def torch_resumes_from_ours(self):
        self.theirs.scaler.load_state_dict(self.ours.scaler.state_dict())

    @invariant()
    def they_agree(self):
        if not hasattr(self, "ours"):
            return
        state = self.ours.scaler.state_dict()
        own = {"skipped", "dynamic", "version"}
        assert {key: state[key] for key in state if key not in own} == self.theirs.scaler.state_dict()
        assert self.ours.scaler.get_scale() == self.theirs.scaler.get_scale()
        assert state["skipped"] == self.ours.scaler.skipped == self.skipped
        for ours, theirs in zip(self.ours.weights, self.theirs.weights, strict=True):
            assert torch.equal(ours, theirs)


TestAgainstTorch = AgainstTorch.TestCase
TestAgainstTorch.settings = settings(max_examples=30, stateful_step_count=30, deadline=None, derandomize=True)


def test_the_defaults_are_torchs(accel):
    theirs = torch.amp.GradScaler("cpu")
    expected = {
        "scale": theirs.get_scale(),
        "growth_factor": theirs.get_growth_factor(),
        "backoff_factor": theirs.get_backoff_factor(),
        "growth_interval": theirs.get_growth_interval(),
    }
    state = accel.scaler.create().state_dict()
    assert {name: state[name] for name in expected} == expected
    settings = accelcore.LossScale()
    assert [settings.init, settings.growth, settings.backoff, settings.interval] == list(expected.values())


@pytest.mark.parametrize("bad", [[], [0], [1], [0, 1]])
def test_an_overflow_of_either_of_two_optimizers_is_seen_by_both(accel, bad):
    """Only the optimizer whose gradient overflowed is skipped; the scale falls once, as torch's does."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.5) for weight in weights]
    scaler = accel.scaler.create(init=8.0)
    factors = [INF if number in bad else 1.0 for number in range(2)]
    scaler.scale(sum((weight * factor).sum() for weight, factor in zip(weights, factors, strict=True))).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert bool(scaler.overflowed) == bool(bad)
    scaler.update()
    assert scaler.get_scale() == (4.0 if bad else 8.0)
    assert [weight.tolist() for weight in weights] == [[1.0, 1.0] if n in bad else [0.5, 0.5] for n in range(2)]

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import accelcore
from accelcore.errors import CheckpointError, ConfigurationError, TrainingError

INF, NAN = math.inf, math.nan
ROUTES = ("fused", "loop", "foreach")


def parameter(*values, dtype=torch.float32):
    return torch.nn.Parameter(torch.tensor(values or (1.0, -2.0), dtype=dtype))


def train_step(scaler, optimizer, weight, factors):
    """One step of the loss sum(factors * weight), whose gradient is `factors`."""
    optimizer.zero_grad()
    scaler.scale((weight * torch.tensor(factors)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


# Against torch's own scaler. It knows no bounds, so the oracle is put back within them after each step.


@dataclass
class Side:
    """One scaler, with its own copy of the weights and an optimizer over them."""

    scaler: object
    kind: str
    weights: list[torch.nn.Parameter] = field(default_factory=lambda: [parameter(0.5, -2.0, 8.0), parameter(1.0)])

    def __post_init__(self):
        kinds = {
            "sgd": lambda: torch.optim.SGD(self.weights, lr=0.25, momentum=0.5, foreach=False),
            "sgd fused": lambda: torch.optim.SGD(self.weights, lr=0.25, fused=True),
            "adam": lambda: torch.optim.Adam(self.weights, lr=0.25, foreach=False),
            "adamw fused": lambda: torch.optim.AdamW(self.weights, lr=0.25, fused=True),
            "adagrad fused": lambda: torch.optim.Adagrad(self.weights, lr=0.25, fused=True),
        }
        self.optimizer = kinds[self.kind]()

    def step(self, gradients, *, unscale):
        self.optimizer.zero_grad()
        loss = sum((weight * torch.tensor(g)).sum() for weight, g in zip(self.weights, gradients, strict=True))
        self.scaler.scale(loss).backward()
        if unscale:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()


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
        assert {key: state[key] for key in state if key != "skipped"} == self.theirs.scaler.state_dict()
        assert state["skipped"] == self.ours.scaler.skipped == self.skipped
        for ours, theirs in zip(self.ours.weights, self.theirs.weights, strict=True):
            assert torch.equal(ours, theirs)


TestAgainstTorch = AgainstTorch.TestCase
TestAgainstTorch.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)


def test_an_endless_overflow_stops_at_the_floor_and_the_next_clean_step_is_right(accel):
    ours, theirs = accel.scaler.create(), torch.amp.GradScaler("cpu")
    weight, other = parameter(1.0, -2.0), parameter(1.0, -2.0)
    mine, others = torch.optim.SGD([weight], lr=0.5), torch.optim.SGD([other], lr=0.5)
    for _ in range(200):
        train_step(ours, mine, weight, (INF, 1.0))
        train_step(theirs, others, other, (INF, 1.0))
    assert theirs.get_scale() == 0.0, "torch has found a floor: the difference that our docstring states is gone"
    assert ours.state_dict()["scale"] == 1.0
    assert ours.skipped == 200
    train_step(ours, mine, weight, (2.0, 4.0))
    assert weight.tolist() == [0.0, -4.0]


def test_the_scale_grows_to_its_ceiling_and_no_further(accel):
    scaler, weight = accel.scaler.create(init=4.0, growth=2.0, interval=1, max=10.0), parameter()
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scales = []
    for _ in range(3):
        train_step(scaler, optimizer, weight, (1.0, 1.0))
        scales.append(scaler.state_dict()["scale"])
    assert scales == [8.0, 10.0, 10.0]


# What is scaled comes back unscaled.

gradients = st.lists(st.floats(-1e6, 1e6, width=32).filter(lambda g: g == 0 or abs(g) > 1e-20), min_size=2, max_size=2)


@given(factors=gradients, exponent=st.integers(0, 24), static=st.booleans())
def test_a_power_of_two_changes_no_bit_of_a_gradient(factors, exponent, static):
    scaler = accelcore.select("cpu").scaler.create(init=2.0**exponent, dynamic=not static)
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.5)
    loss = (weight * torch.tensor(factors)).sum()
    assert scaler.scale(loss).item() == pytest.approx(loss.item() * 2.0**exponent)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == torch.tensor(factors).tolist()


def test_a_gradient_too_small_for_fp16_survives_by_scaling(accel):
    exact = 1e-8  # below half of fp16's smallest number, 6e-8
    results = []
    for scaler in (accel.scaler.none(), accel.scaler.create()):
        weight = torch.nn.Parameter(torch.eye(4))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        with accel.autocast(torch.float16):
            loss = (torch.ones(1, 4) @ weight).float().sum() * exact
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        results.append(weight.grad.flatten().tolist())
    assert results[0] == [0.0] * 16
    assert results[1] == pytest.approx([exact] * 16, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradients_of_any_other_dtype_are_unscaled_and_checked(accel, dtype):
    scaler, weight = accel.scaler.create(init=4.0), parameter(1.0, 2.0, dtype=dtype)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    train_step(scaler, optimizer, weight, (2.0, 4.0))
    assert weight.tolist() == [0.0, 0.0]
    train_step(scaler, optimizer, weight, (2.0, NAN))
    assert weight.tolist() == [0.0, 0.0]
    assert scaler.skipped == 1


def test_parameters_of_several_dtypes_are_checked_together(accel):
    scaler, weights = accel.scaler.create(), [parameter(1.0), parameter(1.0, dtype=torch.float64)]
    optimizer = torch.optim.SGD(weights, lr=0.5)
    weights[0].grad, weights[1].grad = torch.tensor([65536.0]), torch.tensor([INF], dtype=torch.float64)
    scaler.step(optimizer)
    scaler.update()
    assert [weight.item() for weight in weights] == [1.0, 1.0]
    assert scaler.skipped == 1


@pytest.mark.parametrize("duplicates", [False, True])
def test_sparse_gradients_are_unscaled_and_checked(accel, duplicates):
    scaler = accel.scaler.create(init=8.0)
    table = torch.nn.Embedding.from_pretrained(torch.arange(8.0).view(4, 2), freeze=False, sparse=True)
    optimizer = accel.optimizers.create("sgd", table.parameters(), lr=1.0, route="loop")
    before = table.weight.detach().clone()
    rows = torch.tensor([1, 1, 3] if duplicates else [1, 3])
    scaler.scale(table(rows).sum()).backward()
    assert table.weight.grad.is_sparse
    scaler.step(optimizer)
    scaler.update()
    moved = torch.zeros(4, 2)
    for row in rows.tolist():
        moved[row] += 1.0
    assert torch.equal(table.weight, before - moved)
    optimizer.zero_grad()
    scaler.scale(table(rows).sum() * INF).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(table.weight, before - moved)
    assert scaler.skipped == 1


@pytest.mark.parametrize("dynamic", [True, False])
def test_unscaled_gradients_can_be_clipped_before_the_step(accel, dynamic):
    scaler, weight = accel.scaler.create(init=1024.0, dynamic=dynamic), parameter(0.0, 0.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
    scaler.unscale_(optimizer)
    assert torch.nn.utils.clip_grad_norm_([weight], 1.0).item() == pytest.approx(5.0)
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == pytest.approx([-0.6, -0.8])


# A skipped step leaves no trace.


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "adagrad"])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_skipped_step_changes_no_weight_and_counts_for_nothing(accel, name, route, bad):
    """A run with an overflow in it ends where the same run without that step ends."""

    def run(steps):
        weight = parameter(1.0, -2.0)
        options = {"momentum": 0.5} if name == "sgd" else {}
        optimizer = accel.optimizers.create(name, [weight], lr=0.125, route=route, weight_decay=0.5, **options)
        scaler = accel.scaler.create(init=2.0)
        for factors in steps:
            train_step(scaler, optimizer, weight, factors)
        return weight, optimizer.state[weight], scaler

    steps = [(1.0, 2.0), (0.5, -1.0), (4.0, 4.0)]
    weight, state, scaler = run([steps[0], (bad, 1.0), (1.0, bad), *steps[1:]])
    plain, plain_state, _ = run(steps)
    assert scaler.skipped == 2
    assert weight.tolist() == plain.tolist()
    assert set(state) == set(plain_state)
    for key, value in plain_state.items():
        assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("name", "options"), [("adam", {}), ("adamw", {}), ("adagrad", {}), ("sgd", {}), ("sgd", {"momentum": 0.5})]
)
def test_a_run_whose_first_step_overflows_is_right_from_the_second_on(accel, name, options, route):
    def run(*steps):
        weight = parameter(1.0, -2.0)
        optimizer = accel.optimizers.create(name, [weight], lr=0.125, route=route, **options)
        scaler = accel.scaler.create(init=2.0)
        for factors in steps:
            train_step(scaler, optimizer, weight, factors)
        return weight.tolist()

    # What a fresh allocation holds is chance; in this mode torch fills it with NaN, which nobody takes for zero.
    torch.use_deterministic_algorithms(True)
    try:
        assert run((INF, 1.0)) == [1.0, -2.0]
        assert run((INF, 1.0), (2.0, 1.0), (1.0, 1.0)) == run((2.0, 1.0), (1.0, 1.0))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("route", ROUTES)
def test_a_schedule_stepped_after_a_skipped_first_step_stays_quiet(accel, route):
    weight = parameter()
    optimizer = accel.optimizers.create("adamw", [weight], lr=0.125, route=route)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train_step(accel.scaler.create(), optimizer, weight, (INF, 1.0))
    schedule.step()  # a warning is an error here


def test_fused_optimizers_keep_no_reference_to_the_scaler(accel):
    scaler, weight = accel.scaler.create(), parameter()
    optimizer = accel.optimizers.create("adamw", [weight], lr=0.125, route="fused")
    train_step(scaler, optimizer, weight, (1.0, 1.0))
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("kind", ["sgd", "adamw fused"])
@pytest.mark.parametrize("bad", [(), (0,), (1,), (0, 1)])
def test_two_optimizers_share_one_scale_and_skip_each_for_itself(accel, kind, bad):
    ours, theirs = accel.scaler.create(), torch.amp.GradScaler("cpu")
    sides = {scaler: [Side(scaler, kind), Side(scaler, kind)] for scaler in (ours, theirs)}
    for gradients in ([[1.0, 1.0, 1.0], [2.0]], [[1.0, INF, 1.0], [2.0]], [[3.0, 1.0, 1.0], [2.0]]):
        for scaler, pair in sides.items():
            for index, side in enumerate(pair):
                clean = [[1.0, 0.0, 1.0], [2.0]]
                chosen = gradients if index in bad else clean
                side.optimizer.zero_grad()
                loss = sum((w * torch.tensor(g)).sum() for w, g in zip(side.weights, chosen, strict=True))
                scaler.scale(loss).backward()
            scaler.unscale_(pair[0].optimizer)
            for side in pair:
                scaler.step(side.optimizer)
            scaler.update()
    assert ours.state_dict()["scale"] == theirs.get_scale() == (32768.0 if bad else 65536.0)
    assert ours.skipped == (1 if bad else 0)
    for mine, others in zip(sides[ours], sides[theirs], strict=True):
        for weight, other in zip(mine.weights, others.weights, strict=True):
            assert torch.equal(weight, other)


# Calls out of order.


@pytest.mark.parametrize("route", ROUTES)
def test_calls_out_of_order_are_refused_and_the_next_right_step_works(accel, route):
    scaler, weight = accel.scaler.create(), parameter(1.0, -2.0)
    optimizer = accel.optimizers.create("adamw", [weight], lr=0.125, route=route)
    with pytest.raises(TrainingError, match="before any gradient was looked at"):
        scaler.update()
    weight.grad = torch.tensor([65536.0, 65536.0])
    scaler.unscale_(optimizer)
    with pytest.raises(TrainingError, match="unscale_ was already called"):
        scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [1.0, 1.0]
    scaler.step(optimizer)
    stepped = weight.tolist()
    with pytest.raises(TrainingError, match="step was called twice"):
        scaler.step(optimizer)
    with pytest.raises(TrainingError, match="step was already called"):
        scaler.unscale_(optimizer)
    assert weight.tolist() == stepped
    scaler.update()
    with pytest.raises(TrainingError, match="before any gradient was looked at"):
        scaler.update()
    train_step(scaler, optimizer, weight, (1.0, 1.0))
    assert weight.tolist() != stepped
    assert scaler.state_dict()["_growth_tracker"] == 2


@pytest.mark.parametrize("route", ROUTES)
def test_fp16_gradients_are_refused_untouched(accel, route):
    scaler, weights = accel.scaler.create(), [parameter(1.0), parameter(1.0, dtype=torch.float16)]
    optimizer = accel.optimizers.create("adamw", weights, lr=0.125, eps=1e-4, route=route)  # 1e-8 is 0 in fp16
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    for use in (scaler.unscale_, scaler.step):
        with pytest.raises(TrainingError, match="fp16") as caught:
            use(optimizer)
        assert "autocast" in caught.value.remedy
    assert [weight.item() for weight in weights] == [1.0, 1.0]
    assert [weight.grad.item() for weight in weights] == [1.0, 1.0]


def test_parameters_without_gradients_count_as_a_clean_step(accel):
    scaler, weight = accel.scaler.create(interval=1), parameter()
    scaler.step(torch.optim.SGD([weight], lr=0.5))
    scaler.update()
    assert scaler.state_dict()["scale"] == 2 * 65536.0
    assert weight.tolist() == [1.0, -2.0]


# State.


def test_the_state_is_torchs_and_a_count_of_skipped_steps(accel):
    state = accel.scaler.create(init=512.0, growth=4.0, backoff=0.25, interval=7).state_dict()
    oracle = torch.amp.GradScaler("cpu", init_scale=512.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    assert state == {**oracle.state_dict(), "skipped": 0}


def test_a_state_with_more_in_it_is_taken(accel):
    scaler = accel.scaler.create()
    state = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=5).state_dict()
    scaler.load_state_dict({**state, "_growth_tracker": 3, "dynamic": True})
    assert scaler.state_dict() == {**state, "_growth_tracker": 3, "skipped": 0}


@pytest.mark.parametrize(("stored", "taken"), [(0.0, 1.0), (2.0**40, 2.0**24), (3.0, 3.0)])
def test_a_stored_scale_is_brought_within_the_bounds(accel, stored, taken):
    scaler = accel.scaler.create()
    scaler.load_state_dict({**scaler.state_dict(), "scale": stored})
    assert scaler.state_dict()["scale"] == taken


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
        {"_growth_tracker": -1},
    ],
    ids=str,
)
def test_a_state_that_makes_no_sense_is_refused_and_changes_nothing(accel, damage):
    scaler = accel.scaler.create(init=512.0, growth=4.0, backoff=0.25, interval=7)
    state = scaler.state_dict()
    with pytest.raises(CheckpointError):
        scaler.load_state_dict({**accel.scaler.create().state_dict(), **damage})
    assert scaler.state_dict() == state


# Static, and none.


def test_a_static_scale_stays_and_skips_nothing(accel):
    scaler, weight = accel.scaler.create(init=128.0, dynamic=False), parameter(1.0, -2.0)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    for _ in range(3):
        train_step(scaler, optimizer, weight, (2.0, 4.0))
    assert weight.tolist() == [-2.0, -8.0]
    train_step(scaler, optimizer, weight, (INF, 1.0))
    assert weight.tolist() == [-INF, -8.5]
    assert scaler.state_dict() == {"scale": 128.0}
    assert scaler.skipped == 0


def test_a_static_scaler_refuses_to_unscale_twice(accel):
    scaler, weight = accel.scaler.create(init=8.0, dynamic=False), parameter()
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
        with pytest.raises(CheckpointError, match="no static loss scale"):
            scaler.load_state_dict(state)
    for scale in (32.0, NAN, "big", None):
        with pytest.raises(CheckpointError, match=f"saved with loss_scale={scale}, and this training has 8.0"):
            scaler.load_state_dict({"scale": scale})
    assert scaler.state_dict() == {"scale": 8.0}
    assert scaler.scale(torch.tensor(2.0)).item() == 16.0


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
    scaler.load_state_dict({})
    for state in (accel.scaler.create().state_dict(), {"scale": 8.0}):
        with pytest.raises(CheckpointError, match="uses none"):
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
    assert accel.scaler.create(init=0.25, dynamic=False).state_dict() == {"scale": 0.25}
    assert accel.scaler.create(init=2**30, dynamic=False).state_dict() == {"scale": 2.0**30}


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

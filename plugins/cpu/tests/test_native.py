"""Optimizers by the CPU's own kernels: what they compute, and which route they take."""

from __future__ import annotations

import copy
import logging
from functools import partial

import pytest
import torch
from native_cases import CASES, OPTIONS, TOLERANCE, distance, give_gradients, parameters, state_of, train
from thinned import diagonals
from torch import nn

from accelcore.errors import UnsupportedError
from accelcore.optim.formulas import FORMULAS
from accelcore.testing.support.options import oracle


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# What they compute.


@pytest.mark.usefixtures("two_threads")  # one computes the same bits, as is tested below
@pytest.mark.parametrize(("case", "dtype"), diagonals(CASES, TOLERANCE, count=2))
def test_the_kernels_compute_the_formula(accel, case, dtype):
    (name, options), found, expected = case, parameters(dtype), parameters(dtype)
    native = accel.optimizers.create(name, found, route="native", **options)
    formula = FORMULAS[name](expected, **options)
    train(native, found)
    train(formula, expected)
    assert distance(found, expected) < TOLERANCE[dtype]
    assert distance(state_of(native), state_of(formula)) < TOLERANCE[dtype]
    assert [v.dtype for v in state_of(native)] == [v.dtype for v in state_of(formula)]


@pytest.mark.parametrize("name", ["adadelta", "adam", "adamw", "rmsprop", "sgd"])
def test_the_kernels_compute_what_torch_computes_in_float64(accel, name):
    oracle = {"rmsprop": "RMSprop", "sgd": "SGD", "adamw": "AdamW"}.get(name, name.capitalize())
    for options in OPTIONS[name]:
        found, expected = parameters(torch.float64), parameters(torch.float64)
        train(accel.optimizers.create(name, found, route="native", **options), found)
        train(getattr(torch.optim, oracle)(expected, foreach=False, **options), expected)
        assert distance(found, expected) < 1e-12


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_the_number_of_threads_changes_no_bit(accel, name):
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            members = parameters()
            train(accel.optimizers.create(name, members, route="native", **OPTIONS[name][0]), members)
            results.append(members)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_state_can_be_kept_in_bf16(accel):
    members, expected = parameters(), parameters()
    native = accel.optimizers.create("adamw", members, route="native", state_dtype="bfloat16")
    formula = FORMULAS["adamw"](expected, state_dtype="bfloat16")
    train(native, members)
    train(formula, expected)
    assert distance(members, expected) < 1e-4
    assert {v.dtype for v in state_of(native) if v.dim()} == {torch.bfloat16}


def test_nan_and_inf_stay_what_they_are(accel):
    for dtype in TOLERANCE:
        found, expected = parameters(dtype, [(5,)]), parameters(dtype, [(5,)])
        for member in (*found, *expected):
            member.grad = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, 1.0], dtype=dtype)
        accel.optimizers.create("sgd", found, lr=0.5, route="native").step()
        FORMULAS["sgd"](expected, lr=0.5).step()
        assert torch.equal(found[0].nan_to_num(), expected[0].nan_to_num())
        assert torch.equal(found[0].isnan(), expected[0].isnan())


CLIPPING = [("lamb", {"use_global_grad_norm": True}), ("bertadam", {"lr": 0.01})]


@pytest.mark.parametrize("route", ["native", "formula"])
@pytest.mark.parametrize(("name", "options"), CLIPPING)
def test_a_norm_that_is_nan_clips_nothing(accel, name, options, route):
    """As in the sources of both, which multiply if the norm is larger: a NaN reaches no other parameter."""
    found, expected = (parameters(dtype, [(5,), (3, 4)]) for dtype in (torch.float32, torch.float64))
    optimizers = accel.optimizers.create(name, found, route=route, **options), oracle(name, expected, **options)
    for members, optimizer in zip((found, expected), optimizers, strict=True):
        give_gradients(members, 1)
        members[0].grad[2] = torch.nan
        optimizer.step()
    assert found[0].isnan().tolist() == [False, False, True, False, False]
    assert distance(found[1:], expected[1:]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("name", "options"), CLIPPING)
def test_the_kernels_add_up_squares_in_float64(accel, name, options):
    """The formulas do in float32, as the sources: a norm that overflows is infinite, and clips gradients to 0."""
    results = []
    for route in ("native", "formula"):
        members, expected = (parameters(dtype, [(40, 50)]) for dtype in (torch.float32, torch.float64))
        own = accel.optimizers.create(name, members, route=route, **options)
        for optimizer in (own, oracle(name, expected, **options)):
            give_gradients(optimizer.param_groups[0]["params"], 2, scale=1e18)
            optimizer.step()
        results.append(distance(members, expected))
        start = parameters(torch.float32, [(40, 50)])
    assert results[0] < TOLERANCE[torch.float32]
    assert distance(members, start) < 1e-3, "no NaN, and no step along a gradient"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_rounded_as_torch_rounds_it(accel, dtype):
    # The integers' bits are all numbers of a 16-bit type: p - 1 * g in float32, rounded once.
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    member = nn.Parameter(torch.zeros(2**16, dtype=dtype))
    member.grad = every.clone()
    accel.optimizers.create("sgd", [member], lr=1 / 3, route="native").step()
    expected = (-(every.float() * torch.tensor(1 / 3))).to(dtype)
    assert torch.equal(member.isnan(), expected.isnan())
    assert torch.equal(member.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("route", ["native", "formula"])
@pytest.mark.parametrize(("name", "kind"), [("adam", torch.optim.Adam), ("rmsprop", torch.optim.RMSprop)])
def test_a_decay_that_cancels_the_gradient_leaves_what_it_leaves_in_torch(accel, name, kind, route):
    start, options = torch.linspace(0.5, 1, 1000), {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-20}
    options |= {"momentum": 0.9} if name == "rmsprop" else {}
    results = []
    for make in (partial(accel.optimizers.create, name, route=route), partial(kind, foreach=False)):
        weight = nn.Parameter(start.clone())
        weight.grad = start * -0.1  # what is left is the error of this rounding
        make([weight], **options).step()
        results.append(weight.detach() - start)
    assert results[1].abs().mean() > 0.005
    torch.testing.assert_close(*results, rtol=1e-3, atol=0)


# Unscaling and skipping.


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_a_step_unscales_or_does_nothing(accel, name):
    found, expected = parameters(torch.float64), parameters(torch.float64)
    options = OPTIONS[name][0]
    native = accel.optimizers.create(name, found, route="native", **options)
    plain = accel.optimizers.create(name, expected, route="native", **options)
    assert native._step_supports_amp_scaling
    for number in range(3):
        give_gradients(expected, number)
        plain.step()
        give_gradients(found, number, scale=8.0)
        native.grad_scale, native.found_inf = torch.tensor(8.0), torch.tensor(1.0)
        before = copy.deepcopy(([p.detach().clone() for p in found], state_of(native)))
        native.step()
        if number:
            assert all(torch.equal(a, b) for a, b in zip(state_of(native), before[1], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(found, before[0], strict=True))
        native.found_inf = torch.tensor(0.0)
        native.step()
        assert distance(found, expected) < 1e-12
        assert distance([p.grad for p in found], [p.grad for p in expected]) < 1e-12, (
            "as torch's, it unscales in memory"
        )


# Routes.


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_state_moves_between_routes_in_mid_run(accel, name):
    options = OPTIONS[name][-1]
    through = parameters(torch.float64)
    optimizer = accel.optimizers.create(name, through, route="native", **options)
    train(optimizer, through, 6, start=1)
    moved = parameters(torch.float64)
    saved = None
    routes = [choice.route for choice in accel.optimizers.explain(name, **options)]
    for number, route in enumerate(["native", "formula", "fused" if "fused" in routes else "native"] * 2):
        try:
            other = accel.optimizers.create(name, moved, route=route, **options)
        except UnsupportedError:
            other = accel.optimizers.create(name, moved, route="native", **options)
        if saved is not None:
            other.load_state_dict(saved)
        train(other, moved, 1, start=1 + number)
        saved = copy.deepcopy(other.state_dict())
    assert distance(moved, through) < 1e-9


@pytest.mark.parametrize("name", ["adamw", "lamb", "adamp", "bertadam"])
def test_flat_memory_is_updated_as_separate_tensors(accel, name):
    def network():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    data, results = torch.randn(5, 8, 4, generator=torch.Generator().manual_seed(4)), []
    for flat in (False, True):
        model = network()
        optimizer = accel.optimizers.create(name, model.parameters(), lr=0.05)
        trainer = accel.trainer(
            model, optimizer, loss=lambda net, x: (net(x) - x.sum(1, keepdim=True)).square().mean(), flat=flat
        )
        for inputs in data:
            trainer(inputs)
        assert optimizer.route == "native"
        results.append([*model.parameters(), *state_of(optimizer)])
    assert distance(*results) < 1e-6


def test_what_the_kernels_cannot_do_goes_another_way(accel):
    def route(name, tensor, **options):
        return accel.optimizers.create(name, [tensor], **options).route

    assert route("adam", torch.ones(2, 3)) == "native"
    assert route("adam", torch.ones(2, 3, dtype=torch.complex64)) != "native"
    assert route("adamp", torch.ones(2, 3).T.contiguous().T) == "formula"
    assert route("lamb", torch.ones(4, 3)[:, :2]) == "formula"
    with pytest.raises(UnsupportedError, match="differentiable"):
        accel.optimizers.create("sgd", [torch.ones(1)], lr=0.1, differentiable=True, route="native")


def test_a_profile_shows_the_kernel(accel):
    member = nn.Parameter(torch.ones(5))
    optimizer = accel.optimizers.create("lamb", [member])
    give_gradients([member], 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert "accelcore::lamb" in {event.key for event in profile.key_averages()}


def test_groups_have_options_of_their_own_in_one_call(accel):
    found, expected = parameters(torch.float64), parameters(torch.float64)

    def groups(members):
        return [{"params": members[:3]}, {"params": members[3:6], "lr": 0.5}, {"params": members[6:], "momentum": 0.0}]

    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    train(accel.optimizers.create("sgd", groups(found), route="native", **options), found)
    train(torch.optim.SGD(groups(expected), foreach=False, **options), expected)
    assert distance(found, expected) < 1e-12


def test_no_word_is_said_where_all_is_well(accel, caplog):
    accel.optimizers.create("lamb", [nn.Parameter(torch.ones(5))]).step()
    with caplog.at_level(logging.DEBUG, "accelcore"):
        accel.optimizers.create("lamb", [nn.Parameter(torch.ones(5))]).step()
    assert not caplog.messages

"""Optimizers by the CPU's own kernels: what they compute, and that no address is used that is no longer right."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import accelcore
from accelcore.errors import TrainingError, UnsupportedError
from accelcore.optim.formulas import FORMULAS

SHAPES = [(6, 5), (7,), (), (0, 3), (1, 5), (130, 300), (3, 20_000), (2, 3, 4, 4)]
"""A matrix, a vector, a scalar, an empty one, one row, several pieces of rows, rows of several pieces, an image."""

OPTIONS = {
    "adadelta": [{}, {"weight_decay": 0.1, "maximize": True, "rho": 0.6}],
    "adam": [{}, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}, {"decoupled_weight_decay": True}],
    "adamp": [
        {"weight_decay": 0.1},
        {"delta": 5.0, "weight_decay": 0.1},
        {"nesterov": True, "delta": 0.5},
        {"delta": 5.0, "eps": 0.0},
    ],
    "adamw": [{}, {"amsgrad": True, "betas": (0.4, 0.7)}],
    "bertadam": [
        {"lr": 0.01},
        {"lr": 0.01, "t_total": 4, "warmup": 0.3, "schedule": "warmup_cosine", "max_grad_norm": -1},
        {"lr": 0.01, "t_total": 3, "schedule": "warmup_poly"},
        {"lr": 0.01, "t_total": 4},
    ],
    "lamb": [{"weight_decay": 0.1}, {"adam": True}, {"use_global_grad_norm": True}, {"eps": 0.0}],
    "rmsprop": [{}, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}],
    "rmsproptf": [
        {},
        {"momentum": 0.9, "centered": True, "weight_decay": 0.1},
        {"momentum": 0.9, "lr_in_momentum": False, "decoupled_decay": True, "weight_decay": 0.01},
    ],
    "sgd": [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True},
    ],
}
CASES = [(name, options) for name, several in OPTIONS.items() for options in several]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(scope="module")
def accel():
    return accelcore.select("cpu")


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    found = []
    for number, shape in enumerate(shapes):
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64) * (10 if number % 2 else 0.1)
        dense = tensor.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else tensor
        found.append(nn.Parameter(dense.to(dtype)))
    return found


def give_gradients(members, number, *, without=None, scale=1.0):
    generator = torch.Generator().manual_seed(number)
    for position, parameter in enumerate(members):
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 10.0 ** (number % 3 - 2)
        parameter.grad = None if position == without else (gradient * scale).to(parameter.dtype)


def train(optimizer, members, steps=4, start=0):
    for number in range(start, start + steps):
        give_gradients(members, number, without=1 if number == 0 else None)  # one comes late
        optimizer.step()


def distance(found, expected):
    pairs = list(zip(found, expected, strict=True))
    return max((_distance(a, b) for a, b in pairs if a.numel()), default=0.0)  # SGD without momentum has no state


def _distance(found, expected):
    return ((found.double() - expected.double()).norm() / (expected.double().norm() + 1e-6)).item()


def state_of(optimizer):
    return [v for entry in optimizer.state_dict()["state"].values() for _, v in sorted(entry.items())]


# What they compute.


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_kernels_compute_the_formula(accel, threads, name, options, dtype):
    found, expected = parameters(dtype), parameters(dtype)
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


# Nothing stale.


def test_what_was_replaced_between_steps_is_seen(accel):
    found, expected = parameters(torch.float64), parameters(torch.float64)
    native = accel.optimizers.create("adamw", found, route="native", lr=0.1)
    oracle = torch.optim.AdamW(expected, lr=0.1, foreach=False)
    for optimizer, members in ((native, found), (oracle, expected)):
        train(optimizer, members, 2)
        members[0].data = members[0].data * 2  # other memory
        optimizer.state[members[5]]["exp_avg"] = torch.ones_like(members[5])
        optimizer.state[members[0]]["exp_avg_sq"].data = torch.full_like(members[0], 0.5)
        optimizer.param_groups[0]["lr"] = 0.01
        train(optimizer, members, 2, start=2)
        optimizer.add_param_group({"params": [late := nn.Parameter(torch.ones(3, dtype=torch.float64))], "lr": 0.5})
        members.append(late)
        train(optimizer, members, 2, start=4)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(optimizer, members, 1, start=6)
        optimizer.zero_grad()
        optimizer.step()
    assert distance(found, expected) < 1e-12


def _swap(optimizer, members):
    members[2] = nn.Parameter(torch.full_like(members[2], 3.0))
    optimizer.param_groups[0]["params"][2] = members[2]


def _remove(optimizer, members):
    del optimizer.param_groups[0]["params"][1]


def _exchange_lists(optimizer, members):
    optimizer.param_groups[0]["params"] = [member.clone().detach().requires_grad_() for member in members]
    members[:] = optimizer.param_groups[0]["params"]


def _forget(optimizer, members):
    del optimizer.state[members[2]]


def _start_anew(optimizer, members):
    optimizer.state[members[0]] = {name: torch.ones_like(v) for name, v in optimizer.state[members[0]].items()}


def _exchange_state(optimizer, members):
    optimizer.state[members[0]] |= {"exp_avg": torch.ones_like(members[0])}


@pytest.mark.parametrize("change", [_swap, _remove, _exchange_lists, _forget, _start_anew, _exchange_state])
def test_another_object_in_groups_or_state_is_seen(accel, change):
    trained = []
    for make in (accel.optimizers.create, lambda _, members, **options: torch.optim.AdamW(members, **options)):
        members = [nn.Parameter(torch.full((size,), float(size), dtype=torch.float64)) for size in (3, 4, 5)]
        optimizer = make("adamw", members, lr=0.1)
        train(optimizer, members, 2, start=1)
        change(optimizer, members)
        train(optimizer, members, 2, start=3)
        trained.append(members)
    assert distance(*trained) < 1e-12


def test_a_gradient_with_other_strides_is_right(accel):
    found, expected = parameters(torch.float64), parameters(torch.float64)
    native = accel.optimizers.create("sgd", found, lr=0.1, route="native")
    oracle = torch.optim.SGD(expected, lr=0.1)
    for optimizer, members in ((native, found), (oracle, expected)):
        for number in range(3):
            give_gradients(members, number)
            for member in members:
                gradient = member.grad
                member.grad = None
                member.grad = gradient.mT.contiguous().mT if gradient.dim() > 1 and number else gradient
            members[1].grad = torch.arange(14, dtype=torch.float64)[::2]
            optimizer.step()
    assert distance(found, expected) < 1e-12


@pytest.mark.parametrize("unlike", ["strides", "sparse"])
def test_a_gradient_of_another_kind_hides_no_replaced_value_behind_it(accel, unlike):
    first, second = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5))
    native = accel.optimizers.create("sgd", [first, second], route="native", lr=0.25)
    for parameter in (first, second):
        parameter.grad = torch.ones_like(parameter)
    native.step()
    before = second.data
    second.data = torch.full((5,), 8.0)
    first.grad = torch.ones(4, 3).t() if unlike == "strides" else torch.ones(3, 4).to_sparse()
    if unlike == "strides":
        native.step()
        assert second.tolist() == [7.75] * 5
    else:
        with pytest.raises(TrainingError, match="sparse"):
            native.step()
        assert second.tolist() == [8.0] * 5
    assert before.tolist() == [0.75] * 5, "memory that was replaced is left alone"


def test_autograd_notices_that_parameters_changed(accel):
    weight = nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    loss.backward(retain_graph=True)
    accel.optimizers.create("sgd", [weight], lr=0.1, route="native").step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_sparse_gradient_is_refused(accel):
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    optimizer = accel.optimizers.create("adamw", embedding.parameters(), route="native")
    with pytest.raises(TrainingError, match="sparse"):
        optimizer.step()


def test_a_parameter_that_is_cast_keeps_its_state(accel):
    member = nn.Parameter(torch.ones(5))
    optimizer = accel.optimizers.create("lamb", [member], lr=0.1)
    train(optimizer, [member], 2, start=1)
    member.data = member.data.to(torch.bfloat16)
    train(optimizer, [member], 1, start=3)
    assert optimizer.route == "native"
    assert {v.dtype for v in state_of(optimizer)} == {torch.float32}


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

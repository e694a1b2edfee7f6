"""The arithmetic over whole runs computes what the formulas say, whatever lies side by side in them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinned import diagonals
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accelcore.optim.flat.memory import Slot, lay_flat
from accelcore.optim.flat.segments import channels_of, parameters_of
from accelcore.optim.formulas import FLAT_FORMULAS
from accelcore.optim.registry import Optimizers

STEPS = 5
OPTIONS = [
    ("adadelta", {}),
    ("adadelta", {"lr": 0.5, "weight_decay": 0.1, "maximize": True}),
    ("rmsprop", {"weight_decay": 0.1, "momentum": 0.9}),
    ("rmsprop", {"centered": True}),
    ("rmsproptf", {"momentum": 0.9, "weight_decay": 0.1}),
    ("rmsproptf", {"momentum": 0.9, "lr_in_momentum": False, "centered": True}),
    ("rmsproptf", {"weight_decay": 0.1, "decoupled_decay": True}),
    ("bertadam", {"lr": 0.02}),
    ("bertadam", {"lr": 0.02, "weight_decay": 0.0, "t_total": 4, "warmup": 0.5, "max_grad_norm": -1}),
    ("bertadam", {"lr": 0.02, "t_total": 9, "schedule": "warmup_cosine"}),
    ("bertadam", {"lr": 0.02, "t_total": 4, "warmup": 0.0, "schedule": "warmup_poly"}),
    ("lamb", {"lr": 0.02}),
    ("lamb", {"lr": 0.02, "weight_decay": 0.1, "use_global_grad_norm": True, "betas": (0.8, 0.9)}),
    ("lamb", {"lr": 0.02, "adam": True}),
    ("adamp", {"lr": 0.02, "weight_decay": 0.1}),
    ("adamp", {"lr": 0.02, "nesterov": True, "delta": 0.7}),
    ("adamp", {"lr": 0.02, "weight_decay": 0.1, "delta": 2.0, "wd_ratio": 0.3, "betas": (0.0, 0.9)}),
]


def parameters(dtype=torch.float64):
    """Of all kinds: no dimension, no element, norms of 0 and above 10, channels that are nearly orthogonal or not."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (0,), (3, 0), (7,), (130,), (1, 5), (5, 1), (4, 6), (33, 40), (6, 5, 3, 3), (1000, 140)]
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    values[3] *= 0
    values.append(torch.randn(6, 4, generator=generator, dtype=torch.float64).t())
    values.append(
        torch.randn(6, 4, 3, 3, generator=generator, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    )
    return [nn.Parameter(value.to(dtype)) for value in values]


def gradients(values, step):
    """Of all magnitudes; nearly orthogonal to some of the weights; some come late, some not every time."""
    generator = torch.Generator().manual_seed(step)
    for number, value in enumerate(values):
        gradient = torch.randn(value.shape, generator=generator, dtype=torch.float64) * 10.0 ** (number % 5 - 3)
        weight = value.detach().double()
        if number % 2 and weight.dim() > 1 and weight.numel():
            rows = 1 if number % 4 == 1 else len(weight)
            flat, weights = gradient.reshape(rows, -1), weight.reshape(rows, -1)
            flat = flat - weights * (flat * weights).sum(1, True) / (weights * weights).sum(1, True)
            gradient = flat.view(weight.shape)
        absent = (number == 4 and step < 2) or (number == 8 and step == 3)
        value.grad = None if absent else gradient.to(value.dtype)


def groups(values):
    return [{"params": values[:6]}, {"params": values[6:], "lr": 0.01}]


def registry(**how):
    made = Optimizers()
    for name, kind in FLAT_FORMULAS.items():
        made.register(name, "flat", partial(kind, **how), priority=20, memory="flat")
    return made


def trained(optimizers, name, options, *, dtype=torch.float64, route="auto", steps=STEPS):
    values = parameters(dtype)
    optimizer = optimizers.create(name, groups(values), route=route, **options)
    for step in range(steps):
        gradients(values, step)
        optimizer.step()
    return values, optimizer


@pytest.mark.parametrize(("case", "asynchronous"), diagonals(OPTIONS, [False, True]))
def test_a_run_is_updated_as_the_formula_updates_each_parameter(case, asynchronous):
    name, options = case
    found, optimizer = trained(registry(asynchronous=asynchronous), name, options)
    assert optimizer.route == "flat"
    expected, reference = trained(Optimizers(), name, options, route="formula")
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for mine, other in zip(found, expected, strict=True):
        ours, theirs = optimizer.state[mine], reference.state[other]
        assert ours.keys() == theirs.keys()
        torch.testing.assert_close(dict(ours), dict(theirs), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", sorted(FLAT_FORMULAS))
def test_an_overflow_changes_nothing_and_is_not_counted(name):
    def train(skipped):
        values = parameters(torch.float32)
        optimizer = registry(asynchronous=True).create(name, values, lr=0.02)
        assert optimizer._step_supports_amp_scaling
        for step in range(4):
            gradients(values, step)
            with torch.no_grad():
                for value in values:
                    if value.grad is not None:
                        value.grad *= 8 if step != skipped else torch.inf
            optimizer.grad_scale = torch.tensor(8.0)
            optimizer.found_inf = torch.tensor(float(step == skipped))
            before = [value.detach().clone() for value in values]
            optimizer.step()
            if step == skipped:
                assert all(torch.equal(a, b) for a, b in zip(before, values, strict=True))
        return values, [dict(optimizer.state[value]) for value in values]

    values, state = train(skipped=2)
    assert [entry["step"].item() for entry in state][:4] == [3, 3, 3, 3]
    assert all(tensor.isfinite().all() for entry in state for tensor in entry.values())
    unskipped, _ = train(skipped=None)
    assert not all(torch.equal(a, b) for a, b in zip(values, unskipped, strict=True))


@pytest.mark.parametrize("name", ["adamp", "bertadam", "lamb"])
def test_the_default_device_makes_no_difference(name):
    options = {"t_total": 9} if name == "bertadam" else {"weight_decay": 0.1}
    expected, _ = trained(registry(), name, {"lr": 0.02, **options}, steps=2)
    values = parameters()
    optimizer = registry().create(name, groups(values), lr=0.02, **options)
    for step in range(2):
        gradients(values, step)
        with torch.device("meta"):
            optimizer.step()
    torch.testing.assert_close(values, expected)


@pytest.mark.parametrize("name", sorted(FLAT_FORMULAS))
def test_low_precision_has_exact_state(name):
    exact, _ = trained(Optimizers(), name, {"lr": 0.02}, dtype=torch.bfloat16, route="formula", steps=2)
    found, optimizer = trained(registry(asynchronous=True), name, {"lr": 0.02}, dtype=torch.bfloat16, steps=2)
    torch.testing.assert_close(found, exact, rtol=0.02, atol=1e-3)
    kinds = {tensor.dtype for value in found for tensor in optimizer.state[value].values()}
    assert kinds == {torch.float32}
    found, optimizer = trained(registry(), name, {"lr": 0.02, "state_dtype": "bfloat16"}, dtype=torch.float32, steps=2)
    kinds = {tensor.dtype for value in found for key, tensor in optimizer.state[value].items() if key != "step"}
    assert kinds <= {torch.bfloat16}


# By the kind of their graphs: one function, a norm, one norm for all, a norm by channels with a number of steps.
COMPILED_EACH = ("adamw", "adamp", "bertadam", "lamb")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in COMPILED_EACH else pytest.mark.full) for name in sorted(FLAT_FORMULAS)],
)
def test_the_same_graphs_serve_all_numbers(name):
    """By torch.compile without inductor, which takes long and was looked at by itself."""
    graphs = []
    apart = {"adamp": ["count"], "bertadam": ["clip", "count"], "lamb": ["clip"]}.get(name, [])
    options = {"bertadam": {"t_total": 9, "warmup": 0.5}, "lamb": {"use_global_grad_norm": True}}.get(name, {})

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def train(optimizers, **how):
        values = parameters(torch.float32)
        optimizer = optimizers.create(name, values, lr=0.02, weight_decay=0.1, **options, **how)
        for step in range(8):
            gradients(values, step + 4)
            group = optimizer.param_groups[0]
            group["lr"] *= 0.9
            group["weight_decay"] *= 0.9
            for option in ("b1", "rho", "alpha", "delta"):
                if option in group:
                    group[option] *= 0.99
            if "betas" in group:
                group["betas"] = (group["betas"][0] * 0.99, group["betas"][1])
            optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(1.0 + step)
            optimizer.step()
        return values

    compiled = partial(torch.compile, backend=backend, fullgraph=True)
    found = train(registry(asynchronous=True, compile=compiled))
    assert len(graphs) == 1 + len(apart)
    torch.testing.assert_close(found, train(registry(asynchronous=True)), rtol=1e-5, atol=1e-6)


def test_a_step_on_fake_tensors_leaves_real_ones_alone():
    def step(compile):
        value = nn.Parameter(torch.ones(3))
        engine = FLAT_FORMULAS["rmsprop"]([value], lr=0.0625, asynchronous=True, compile=compile)
        value.grad = torch.ones(3)
        with torch.no_grad():
            engine.update(None, None)
        return value

    with FakeTensorMode():
        step(lambda function: function)
    torch.testing.assert_close(step(lambda function: function), step(None))


def test_groups_of_any_shapes_are_compiled():
    """torch.compile gives up where it had to compile the same function eight times."""
    shapes = [(96, 96), (40, 64), (10, 3), (8, 3, 7, 7), (5,), (300, 200), (128, 128), (32, 8, 3, 3), (1, 1), (2, 3)]
    made = [
        {"params": [nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(shape[0]))], "weight_decay": number % 2}
        for number, shape in enumerate([*shapes, *shapes])
    ]
    compiled = partial(torch.compile, backend="eager", fullgraph=True)
    optimizer = registry(asynchronous=True, compile=compiled).create("adamp", made, lr=0.01)
    gradients([value for group in made for value in group["params"]], step=4)
    optimizer.step()
    assert all(optimizer.state[group["params"][0]]["step"].item() == 1 for group in made)


def test_optimizers_of_equal_models_are_compiled_once():
    seen = []

    def compiled(function):
        seen.append(function)
        return function

    def train(*shapes, **options):
        values = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        optimizer = registry(asynchronous=True, compile=compiled).create("lamb", values, lr=0.01, **options)
        gradients(values, step=4)
        optimizer.step()
        return len(seen)

    assert [train((4, 5), (3,)), train((4, 5), (3,)), train((60, 50), (3,)), train((4, 5), (3,))] == [1, 1, 2, 2]
    assert train((4, 5), (3,), state_dtype="bfloat16") == 3


shapes = st.lists(
    st.lists(st.integers(0, 9) | st.sampled_from([127, 128, 129, 300]), max_size=3), min_size=1, max_size=6
)


@settings(max_examples=25)
@given(shapes=shapes, transposed=st.booleans())
def test_sums_and_factors_of_segments(shapes, transposed):
    """Against a loop over the parameters, for parameters and for channels."""
    values = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    values = [nn.Parameter(value.transpose(0, -1) if transposed and value.dim() else value) for value in values]
    (memory,) = lay_flat([Slot(str(number), 0, value, value) for number, value in enumerate(values)], [0])
    (run,) = memory.runs(memory.values, memory.gradients)
    parameters = parameters_of(run)
    expected = torch.stack([value.detach().sum() for value in values])
    torch.testing.assert_close(parameters.sum(run.value), expected)
    factors = torch.randn(len(values), dtype=torch.float64)
    scaled = run.parts(parameters.multiply(run.value, factors, elsewhere=0.0))
    torch.testing.assert_close(scaled, [value.detach() * f for value, f in zip(values, factors, strict=True)])
    channels, wide = channels_of(run), [value.detach() for value in values if value.dim() > 1 and value.numel()]
    assert (channels is None) == (not wide)
    if channels is not None:
        by_channel = channels.segments.sum(run.value)
        torch.testing.assert_close(by_channel, torch.cat([value.flatten(1).sum(1) for value in wide]))
        torch.testing.assert_close(channels.parameters.sum(by_channel), torch.stack([value.sum() for value in wide]))
        factors = torch.randn(len(by_channel), dtype=torch.float64)
        scaled = run.parts(channels.segments.multiply(run.value, factors, elsewhere=1.0))
        each = iter(factors.split([len(value) for value in wide]))
        for before, after in zip(values, scaled, strict=True):
            at = next(each).view(-1, *[1] * (before.dim() - 1)) if before.dim() > 1 and before.numel() else 1.0
            torch.testing.assert_close(after, before.detach() * at)


def test_a_sum_takes_no_more_operators_for_more_parameters():
    def levels(count):
        values = [nn.Parameter(torch.ones(40, 3)) for _ in range(count)]
        (memory,) = lay_flat([Slot(str(number), 0, value, value) for number, value in enumerate(values)], [0])
        (run,) = memory.runs(memory.values, memory.gradients)
        channels = channels_of(run)
        return len(parameters_of(run).levels), len(channels.segments.levels), len(channels.parameters.levels)

    assert levels(2) == levels(500) == (1, 1, 1)

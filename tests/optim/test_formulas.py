"""Every route to the nine optimizers, in every dtype, against oracles in float64 that share no code with them."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinned import diagonals
from torch import nn

import accelcore
from accelcore.errors import ConfigurationError, TrainingError, UnsupportedError
from accelcore.optim.formulas import FORMULAS
from accelcore.testing.support.options import LR, NINE, ORACLES, oracle

EACH = pytest.mark.parametrize("name", NINE)
LOW = (torch.bfloat16, torch.float16)
SHAPES = {
    "scalar": (),
    "empty": (0,),
    "no rows": (0, 3),
    "vector": (7,),
    "matrix": (5, 4),
    "one row": (1, 6),
    "transposed": (4, 5),
    "channels last": (2, 3, 4, 2),
}


def tensor(kind, scale, generator, dtype):
    """One of these shapes, with strides of its own; zeros where the scale is 0."""
    values = (scale * torch.randn(SHAPES[kind], generator=generator, dtype=torch.float64)).to(dtype)
    if kind == "transposed":
        return values.t().contiguous().t()
    return values.contiguous(memory_format=torch.channels_last) if kind == "channels last" else values


@st.composite
def runs(draw, name):
    """A seed, the options, and for each parameter its shape, its size and how large its gradients are, or None."""
    sizes = st.sampled_from([0.0, 1e-3, 1.0, 30.0])
    steps = st.one_of(st.none(), st.just(0.0), st.floats(-4, 2).map(lambda exponent: 10**exponent))
    kinds = st.lists(st.tuples(st.sampled_from(sorted(SHAPES)), sizes), min_size=1, max_size=4)
    members = draw(kinds)
    gradients = draw(st.lists(st.lists(steps, min_size=len(members), max_size=len(members)), min_size=1, max_size=4))
    return draw(st.integers(0, 2**32)), draw(st.sampled_from(ORACLES[name][1])), members, gradients


accelerator = functools.cache(lambda: accelcore.select("cpu"))  # hypothesis wants none that a fixture makes


def routes(name, members, options):
    """The routes that take these, by name; torch's keep moments in low precision, which is another formula."""
    low = members[0].dtype in LOW
    optimizers = accelerator().optimizers
    for choice in optimizers.explain(name, lr=LR, **options):
        own = [nn.Parameter(member.clone()) for member in members]
        if low and choice.route in ("fused", "loop", "foreach"):
            continue
        try:
            yield own, optimizers.create(name, own, lr=LR, route=choice.route, **options)
        except UnsupportedError:
            continue


@pytest.mark.parametrize(("name", "dtype"), diagonals(NINE, [torch.float64, torch.float32, *LOW], count=2))
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_every_step_of_every_route_is_the_oracles(name, dtype, data):
    """The oracle takes each step from where the route is, so that no step hides behind another's rounding."""
    seed, options, kinds, sizes = data.draw(runs(name))
    generator = torch.Generator().manual_seed(seed)
    start = [tensor(kind, size, generator, dtype) for kind, size in kinds]
    feed = [
        [
            None if size is None else tensor(kind, size, generator, dtype)
            for (kind, _), size in zip(kinds, step, strict=True)
        ]
        for step in sizes
    ]
    taken = 0
    for members, optimizer in routes(name, start, options):
        taken += 1
        exact = [nn.Parameter(member.detach().double().contiguous()) for member in members]
        reference = oracle(name, exact, lr=LR, **options)
        for gradients in feed:
            before = [member.detach().clone() for member in members]
            for member, its, gradient in zip(members, exact, gradients, strict=True):
                member.grad = None if gradient is None else gradient.clone()
                its.grad = None if gradient is None else gradient.double()
            optimizer.step()
            reference.step()
            for member, expected, was in zip(members, exact, before, strict=True):
                assert member.stride() == was.stride()
                if not member.numel():
                    continue
                # One rounding of the result, and what float32 does to a step.
                fine = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
                top, length = (
                    float(expected.detach().abs().max()),
                    float((expected.detach() - was.double()).abs().max()),
                )
                tolerance = 2 * torch.finfo(dtype).eps * top + 500 * fine * length + 1e-30
                tolerance += torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
                if name == "adamp":  # a projected step is what is left of a longer one
                    tolerance += 100 * fine * LR
                off = float((member.detach().double() - expected.detach()).abs().max())
                assert off <= tolerance, f"route {optimizer.route} with {options} is off by {off:.1e}"
            with torch.no_grad():
                for expected, member in zip(exact, members, strict=True):
                    expected.copy_(member)
    assert taken


@EACH
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_moments_of_low_precision_are_float32_and_a_tiny_eps_is_not_lost_in_them(accel, name, dtype):
    options = {} if name == "sgd" else {"e" if name == "bertadam" else "eps": 1e-8}
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = accel.optimizers.create(name, [parameter], lr=1e-3, **options)
    for _ in range(3):
        parameter.grad = torch.full_like(parameter, 1e-4)  # the square of which is 0 in float16
        optimizer.step()
    assert parameter.isfinite().all()
    entry = optimizer.state_dict()["state"].get(0, {})
    assert {value.dtype for value in entry.values()} <= {torch.float32}
    if name not in ("sgd", "rmsproptf"):
        assert all(value.ne(0).any() for key, value in entry.items() if "sq" in key)


WRONG = {
    **{(name, "lr"): (-1.0, math.nan) for name in NINE},
    **{(name, "weight_decay"): (-0.1,) for name in NINE},
    **{(name, "eps"): (-1.0,) for name in NINE if name not in ("sgd", "bertadam")},
    **{(name, "betas"): ((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9)) for name in ("adam", "adamp", "adamw", "lamb")},
    ("adadelta", "rho"): (-0.1, 1.1),
    ("adamp", "delta"): (-0.1,),
    ("adamp", "wd_ratio"): (-0.1,),
    ("bertadam", "b1"): (1.0, -0.1),
    ("bertadam", "b2"): (1.0, -0.1),
    ("bertadam", "e"): (-1.0, math.nan),
    ("bertadam", "schedule"): ("warmup_square",),
    ("bertadam", "warmup"): (1.0, -0.5),
    ("rmsprop", "alpha"): (-0.1,),
    ("rmsprop", "momentum"): (-0.1,),
    ("rmsproptf", "alpha"): (-0.1,),
    ("rmsproptf", "momentum"): (-0.1,),
    ("sgd", "momentum"): (-0.1,),
    ("sgd", "nesterov"): (True,),
    **{(name, "state_dtype"): ("float16", "int8") for name in NINE},
    **{(name, "no_such_option"): (1,) for name in NINE},
}


@pytest.mark.parametrize(("name", "option"), list(WRONG))
def test_invalid_options_are_refused(accel, name, option):
    for value in WRONG[name, option]:
        with pytest.raises(ConfigurationError):
            accel.optimizers.create(name, [nn.Parameter(torch.ones(2))], **{"lr": LR, option: value})


@pytest.mark.parametrize("name", ["adamp", "bertadam", "lamb", "rmsproptf"])
@pytest.mark.parametrize("option", ["maximize", "amsgrad", "capturable", "differentiable", "fused", "foreach"])
def test_what_a_formula_lacks_is_refused_and_not_ignored(accel, name, option):
    with pytest.raises((ConfigurationError, UnsupportedError)):
        accel.optimizers.create(name, [nn.Parameter(torch.ones(2))], lr=LR, **{option: True})


@EACH
def test_a_learning_rate_of_one_group_is_looked_at_too(name):
    with pytest.raises(ValueError, match="lr"):
        FORMULAS[name]([{"params": [nn.Parameter(torch.ones(2))], "lr": -1.0}], lr=LR)


@EACH
def test_a_formula_refuses_a_sparse_gradient_and_changes_nothing(name):
    weight, other = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))
    optimizer = FORMULAS[name]([other, weight], lr=LR)
    weight.grad, other.grad = torch.ones(3, 2).to_sparse(), torch.ones(2)
    with pytest.raises(TrainingError, match="sparse"):
        optimizer.step()
    assert torch.equal(weight, torch.ones(3, 2))
    assert torch.equal(other, torch.ones(2))
    assert not optimizer.state


@pytest.mark.parametrize("name", [name for name in NINE if FORMULAS[name].by_element])
def test_complex_parameters_are_pairs_of_real_ones(name):
    generator = torch.Generator().manual_seed(1)
    pairs = nn.Parameter(torch.randn(3, 2, generator=generator))
    whole = nn.Parameter(torch.view_as_complex(pairs.detach().clone()))
    optimizers = [FORMULAS[name]([each], lr=LR) for each in (pairs, whole)]
    for _ in range(3):
        pairs.grad = torch.randn(3, 2, generator=generator)
        whole.grad = torch.view_as_complex(pairs.grad.clone())
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(torch.view_as_real(whole.detach()), pairs.detach())


@pytest.mark.parametrize("name", ["adamp", "lamb"])
def test_what_is_not_defined_for_complex_parameters_is_refused(accel, name):
    with pytest.raises(UnsupportedError, match="complex"):
        accel.optimizers.create(name, [nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=LR)


def test_adamp_does_not_project_because_the_norm_of_a_gradient_overflows(accel):
    generator = torch.Generator().manual_seed(0)
    values, gradient = torch.randn(4, 500, generator=generator), torch.randn(4, 500, generator=generator)
    updated = []
    for dtype, route in ((torch.float64, "formula"), (torch.float32, "formula"), (torch.float32, "auto")):
        parameter = nn.Parameter(values.to(dtype, copy=True))
        optimizer = accel.optimizers.create("adamp", [parameter], lr=LR, route=route)
        parameter.grad = (gradient + values).to(dtype) * 1e18  # the sum of its squares overflows float32
        optimizer.step()
        updated.append(parameter.detach().double())
    assert all(float((found - updated[0]).abs().max()) < 1e-6 for found in updated[1:])


def test_the_learning_rate_of_bertadam_after_the_end_of_its_schedule():
    for schedule, moves in (("linear", False), ("cosine", False), ("poly", False), ("constant", True)):
        parameter = nn.Parameter(torch.ones(2))
        optimizer = FORMULAS["bertadam"]([parameter], lr=0.1, schedule=f"warmup_{schedule}", t_total=4, warmup=0.5)
        for _ in range(6):
            before = parameter.detach().clone()
            parameter.grad = torch.ones(2)
            optimizer.step()
        assert (not torch.equal(parameter, before)) is moves


def test_bertadam_clips_a_group_by_the_groups_own_norm():
    first, second, free = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    optimizer = FORMULAS["bertadam"](
        [{"params": [first, second]}, {"params": [free], "max_grad_norm": -1.0}], lr=0.1, b1=0.0
    )
    first.grad, second.grad, free.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0]), torch.tensor([30.0, 0.0])
    optimizer.step()
    torch.testing.assert_close(optimizer.state[first]["exp_avg"], torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(optimizer.state[second]["exp_avg"], torch.tensor([0.0, 0.8]))
    torch.testing.assert_close(optimizer.state[free]["exp_avg"], torch.tensor([30.0, 0.0]))


def test_lamb_divides_by_the_norm_of_all_gradients_where_it_exceeds_1():
    first, second = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = FORMULAS["lamb"](
        [{"params": [first]}, {"params": [second], "use_global_grad_norm": False}],
        betas=(0.0, 0.9), use_global_grad_norm=True,
    )  # fmt: skip
    for size, expected in ((10.0, 0.6), (0.1, 0.6)):
        first.grad, second.grad = torch.tensor([0.6 * size]), torch.tensor([0.8 * size])
        optimizer.step()
        kept = expected if size > 1 else 0.6 * size
        torch.testing.assert_close(optimizer.state[first]["exp_avg"], torch.tensor([kept]))
        torch.testing.assert_close(optimizer.state[second]["exp_avg"], second.grad)

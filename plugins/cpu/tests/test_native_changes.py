"""Whatever a script changes between two steps, the CPU's kernels compute what torch computes, or refuse it.

`tox -e sanitize` runs this file with kernels that report each access to memory that is not theirs.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from accelcore.errors import AccelError, TrainingError
from accelcore.optim.formulas import FORMULAS

NAMES = {
    "adadelta": {},
    "adam": {"amsgrad": True},
    "adamp": {},
    "adamw": {},
    "bertadam": {"lr": 0.1},
    "lamb": {},
    "rmsprop": {"momentum": 0.9},
    "rmsproptf": {"momentum": 0.9},
    "sgd": {"lr": 0.1, "momentum": 0.9},
}
TORCHS = {"adadelta": "Adadelta", "adam": "Adam", "adamw": "AdamW", "rmsprop": "RMSprop", "sgd": "SGD"}


def _first(optimizer, value):
    """The first elementwise tensor of a parameter's state."""
    return next((key, v) for key, v in sorted(optimizer.state[value].items()) if torch.is_tensor(v) and v.dim())


def _resize_memory(tensor):
    storage, size = tensor.untyped_storage(), tensor.untyped_storage().nbytes()
    storage.resize_(0)
    storage.resize_(size)
    tensor.fill_(2.0)


def _give(tensor, make):
    tensor.data = make(tensor.data)


def _of_value(make):
    return lambda optimizer, members, n: _give(members[n], make)


def _of_state(make):
    return lambda optimizer, members, n: _give(_first(optimizer, members[n])[1], make)


def _expanded(data):
    return data[:1].expand_as(data) if data.dim() else data


def _replace_state(optimizer, members, n):
    optimizer.state[members[n]][_first(optimizer, members[n])[0]] = torch.full_like(members[n], 0.5)


def _swap_state(optimizer, members, n):
    torch.utils.swap_tensors(_first(optimizer, members[n])[1], torch.full_like(members[n].detach(), 0.25))


def _count_again(optimizer, members, n):
    if "step" in optimizer.state[members[n]]:
        optimizer.state[members[n]]["step"] = torch.tensor(7.0)


def _replace_parameter(optimizer, members, n):
    members[n] = optimizer.param_groups[0]["params"][n] = nn.Parameter(torch.full_like(members[n], 3.0))


CHANGES = {
    "other memory": _of_value(lambda data: data * 2),
    "turned": _of_value(lambda data: data.t().contiguous().t()),
    "swapped": lambda _, members, n: torch.utils.swap_tensors(members[n], nn.Parameter(members[n].detach() * 3)),
    "memory resized": lambda _, members, n: _resize_memory(members[n].data),
    "memory grown": lambda _, members, n: members[n].data.resize_(2 * members[n].shape[0], 4).fill_(1.0),
    "another parameter": _replace_parameter,
    "state given data": _of_state(lambda data: data * 0.5),
    "state turned": _of_state(lambda data: data.t().contiguous().t()),
    "state negative": _of_state(lambda data: torch._neg_view(data.neg())),
    "state negative where it is": _of_state(torch._neg_view),
    "state resized": lambda optimizer, members, n: _resize_memory(_first(optimizer, members[n])[1]),
    "state replaced": _replace_state,
    "state swapped": _swap_state,
    "state deleted": lambda optimizer, members, n: optimizer.state.pop(members[n]),
    "counted again": _count_again,
}
"""Changes that torch follows, and the kernels too."""

REFUSED = {
    "grown": _of_value(lambda data: torch.cat([data, data])),
    "cut": _of_value(lambda data: data[:1]),
    "transposed": _of_value(lambda data: data.t()),
    "flat": _of_value(lambda data: data.reshape(-1)),
    "expanded": _of_value(_expanded),
    "negative": _of_value(lambda data: torch._neg_view(data.neg())),
    "shared": lambda _, members, n: setattr(members[n], "data", members[n + 3].data),
    "memory taken": lambda _, members, n: members[n].data.untyped_storage().resize_(0),
    "memory cut": lambda _, members, n: members[n].data.untyped_storage().resize_(8),
    "state cut": _of_state(lambda data: data[:1]),
    "state without memory": lambda o, members, n: _first(o, members[n])[1].untyped_storage().resize_(0),
}
"""Changes that the kernels refuse, before they write anything."""

GRADIENTS = {
    "plain": lambda gradient: gradient,
    "none": lambda gradient: None,
    "turned": lambda gradient: gradient.t().contiguous().t(),
    "expanded": lambda gradient: gradient[:1, :1].expand_as(gradient),
    "with gaps": lambda gradient: torch.stack([gradient, gradient * 2], -1)[..., 0],
    "negative": lambda gradient: torch._neg_view(gradient),
    "zero": lambda gradient: torch._efficientzerotensor(gradient.shape, dtype=gradient.dtype),
}
places = st.integers(0, 5)
steps = st.tuples(
    st.lists(st.tuples(places, st.sampled_from(list(CHANGES))), max_size=2),
    st.dictionaries(places, st.sampled_from(list(GRADIENTS)), max_size=3),
    st.booleans(),
)


CUT = {"to nothing": 0, "to one element": 8}


def _members():
    return [nn.Parameter(torch.arange(1.0, 1 + n * 4, dtype=torch.float64).reshape(n, 4)) for n in (4, 2, 5) * 2]


def _optimizers(accel, name):
    """Ours and the oracle, torch's class or the formula, each with parameters of its own."""
    for_native, for_oracle = _members(), _members()
    native = accel.optimizers.create(name, for_native, route="native", **NAMES[name])
    kind, plain = (getattr(torch.optim, TORCHS[name]), {"foreach": False}) if name in TORCHS else (FORMULAS[name], {})
    return (native, for_native), (kind(for_oracle, **plain, **NAMES[name]), for_oracle)


def _give_gradients(members, number, kinds):
    for place, member in enumerate(members):
        gradient = torch.linspace(number + 1.0, -2.0, member.numel(), dtype=torch.float64).reshape(member.shape)
        member.grad = GRADIENTS[kinds.get(place, "plain")](gradient)


@pytest.mark.parametrize("name", NAMES)
@given(program=st.lists(steps, min_size=1, max_size=4))
@settings(
    max_examples=int(os.environ.get("ACCEL_TEST_CHANGES", "15")),
    deadline=None,
    derandomize="ACCEL_TEST_CHANGES" not in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example(program=[([(0, change)], {}, False) for change in CHANGES])
@example(program=[([], dict.fromkeys(range(6), kind), scaled) for kind in GRADIENTS for scaled in (False, True)])
def test_a_change_that_torch_follows_is_followed(accel, name, program):
    pairs = _optimizers(accel, name)
    if name in ("adamp", "lamb"):  # they refuse matrices whose rows are scattered
        program = [([change for change in changes if change[1] != "turned"], *rest) for changes, *rest in program]
    for number, (changes, kinds, scaled) in enumerate([([], {}, False), *program]):
        for optimizer, members in pairs:
            for place, change in changes:
                if optimizer.state.get(members[place]) or not change.startswith("state "):
                    CHANGES[change](optimizer, members, place)
            _give_gradients(members, number, kinds)
            if scaled and optimizer is pairs[0][0]:
                for member in members:
                    if member.grad is not None:
                        member.grad = member.grad * 4
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
            optimizer.step()
            optimizer.grad_scale = optimizer.found_inf = None
            torch.full((64, 4), float("nan"), dtype=torch.float64)  # where freed tensors were
        torch.testing.assert_close(pairs[0][1], pairs[1][1], rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", REFUSED)
def test_a_change_that_is_refused_leaves_all_as_it_was(accel, name, change):
    (optimizer, members), _ = _optimizers(accel, name)
    _give_gradients(members, 0, {})
    optimizer.step()
    before = [member.detach().clone() for member in members]
    REFUSED[change](optimizer, members, 1)
    gradients = [torch.ones_like(member) if place != 1 else None for place, member in enumerate(members)]
    gradients[1] = torch.ones(members[1].shape, dtype=torch.float64)
    for member, gradient in zip(members, gradients, strict=True):
        member.grad = gradient
    for _ in range(2):
        with pytest.raises(AccelError):
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(members[2:], before[2:], strict=True))


@pytest.mark.parametrize("size", CUT.values(), ids=list(CUT))
@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_whose_memory_was_cut_is_refused(accel, name, size):
    (optimizer, members), _ = _optimizers(accel, name)
    for number in range(2):
        _give_gradients(members, number, {})
        before = [member.detach().clone() for member in members]
        members[1].grad.untyped_storage().resize_(size)
        with pytest.raises(TrainingError, match="resized"):
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(members, before, strict=True))
        _give_gradients(members, number, {})
        optimizer.step()


@pytest.mark.parametrize("place", [0, 1199])
def test_a_change_is_followed_wherever_it_is_among_many_tensors(accel, place):
    for_native, for_oracle = ([nn.Parameter(torch.full((3,), float(n))) for n in range(1200)] for _ in range(2))
    native = accel.optimizers.create("sgd", for_native, route="native", **NAMES["sgd"])
    oracle = torch.optim.SGD(for_oracle, **NAMES["sgd"])
    for number in range(5):
        for optimizer, members in ((native, for_native), (oracle, for_oracle)):
            for n, member in enumerate(members):
                member.grad = torch.full((3,), n / 7 + number)
            if number == 1:
                members[place].data = members[place].data * 2
            if number == 2:
                members[place].grad = None
            if number == 3:
                CHANGES["state given data"](optimizer, members, place)
            if number == 4:
                CHANGES["state swapped"](optimizer, members, place)
            optimizer.step()
        torch.testing.assert_close(for_native, for_oracle)

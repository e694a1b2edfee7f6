"""What the suite compares with must depend on what it is to show."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from accelcore.testing.suite import runtime
from accelcore.testing.support.expected import Expected
from accelcore.testing.support.options import (
    LR,
    OPTIONS,
    ORACLES,
    STEPS,
    options_of,
    oracle,
    parameters,
    step,
    taken_by,
)
from accelcore.testing.support.oracles import Stateful, batches, buffers, error, evaluated

HOST = torch.device("cpu")


@pytest.fixture(scope="module")
def trained():
    model = Stateful(dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    torch.manual_seed(0)
    losses = []
    for rows, classes in batches(40):
        loss = cross_entropy(model(rows), classes)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5]), "it does not learn"
    return model


@pytest.mark.parametrize("name", [name for name, _ in Stateful().named_buffers() if "tracked" not in name])
def test_its_answers_depend_on_every_buffer(trained, name):
    spoiled = copy.deepcopy(trained)
    fresh = dict(Stateful().named_buffers())
    dict(spoiled.named_buffers())[name].copy_(fresh[name])
    assert error(evaluated(spoiled, HOST), evaluated(trained, HOST)) > 0.01


def test_it_has_every_kind_of_state(trained):
    assert set(buffers(trained)) - set(trained.state_dict()) == {"shift"}
    assert trained.second.weight is trained.first.weight
    assert [name for name, parameter in trained.named_parameters() if not parameter.requires_grad] == ["exit.bias"]


def test_it_is_the_same_for_the_same_seed_and_draws_nothing_of_the_tests():
    state = torch.get_rng_state()
    one, same, other = Stateful(seed=3), Stateful(seed=3), Stateful(seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(evaluated(one, HOST), evaluated(same, HOST))
    assert not torch.equal(evaluated(one, HOST), evaluated(other, HOST))


def run(name, options):
    members = parameters(HOST, torch.float64)
    optimizer = oracle(name, members, lr=LR, **options)
    for number in range(STEPS):
        step(optimizer, members, number)
    entries = enumerate(optimizer.state_dict()["state"].values())
    state = {
        (number, key): torch.as_tensor(value)
        for number, entry in entries
        for key, value in entry.items()
        if value is not None
    }
    return members, state


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name in ORACLES for option in options_of(name)],
)
def test_every_option_shows_in_what_is_compared(name, option):
    """What ignored it would be off by ten times the tolerance of the suite, in a parameter or in a state."""
    given = options_of(name)[option]
    assert given in ORACLES[name][1]
    (members, state), (others, plain) = run(name, given), run(name, {key: given[key] for key in given if key != option})
    assert (
        state.keys() != plain.keys()
        or max(map(error, members, others)) > 2e-4
        or max(error(state[key], plain[key]) for key in state) > 1e-3
    )


def test_no_option_is_left_out():
    ways = {"params", "lr", "foreach", "fused", "capturable", "differentiable"}
    for kind, _ in ORACLES.values():
        assert taken_by(kind) - ways <= set(OPTIONS)


@pytest.mark.parametrize(("error", "wrong"), [(1e-7, False), (1e-5, True)])
def test_an_element_that_rounding_has_hardly_moved_by_chance_may_be_as_far_off_as_others(error, wrong):
    """In sums that cancel, where the size of the result says nothing of the size of its rounding errors."""
    right, noise = torch.zeros(5, dtype=torch.float64), torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0]) * 1e-7
    rounded = [lambda: [right + noise, right - noise]]
    expected = Expected("result 0", right, torch.float32, 1, lambda: None, True, rounded)
    assert bool(expected.differs(torch.full((5,), error))) == wrong


@pytest.mark.parametrize("test", ["test_memory", "test_reading_keeps_the_peak"])
def test_memory_that_the_process_keeps_is_no_fault_of_the_host(accel, test):
    torch.ones(28 * 2**18)  # 28 MiB that are freed: from then on, glibc keeps pieces of up to that size
    freed = [torch.ones(2**20) for _ in range(90)]
    pins = [torch.ones(2**18) for _ in range(3)]  # behind them in memory: what is before stays with the process
    del freed
    getattr(runtime.TestRuntime(), test)(accel)
    del pins

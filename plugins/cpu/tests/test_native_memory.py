"""Optimizers by the CPU's own kernels read and write no address that is no longer right."""

from __future__ import annotations

import copy

import pytest
import torch
from native_cases import distance, give_gradients, parameters, state_of, train
from torch import nn

from accelcore.errors import TrainingError


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


@pytest.mark.parametrize("change", ["convert", "load", "by hand"])
def test_tensors_that_torch_swaps_are_seen(accel, monkeypatch, change):
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    trained = []
    for make in (accel.optimizers.create, lambda _, members, **options: torch.optim.AdamW(members, **options)):
        members = nn.ParameterList(torch.full((300,), float(size), dtype=torch.float64) for size in range(40))
        optimizer = make("adamw", members, lr=0.1)
        train(optimizer, list(members), 2, start=1)
        if change == "convert":
            members.to("cpu", torch.float64)
        elif change == "load":
            members.load_state_dict({name: 2 * value for name, value in members.state_dict().items()})
        else:
            for member in members:
                torch.utils.swap_tensors(member, nn.Parameter(member.detach() * 3))
        torch.full((40, 300), 7.0, dtype=torch.float64)  # where the old ones were
        train(optimizer, list(members), 2, start=3)
        trained.append(list(members))
    assert distance(*trained) < 1e-12


def test_state_that_torch_swaps_is_seen(accel):
    members = [nn.Parameter(torch.ones(300)) for _ in range(3)]
    optimizer = accel.optimizers.create("sgd", members, lr=1.0, momentum=0.5, route="native")
    train(optimizer, members, 2, start=1)
    torch.utils.swap_tensors(optimizer.state[members[0]]["momentum_buffer"], torch.full((300,), 8.0))
    before = members[0].detach().clone()
    members[0].grad = torch.zeros(300)
    optimizer.step()
    assert torch.equal(members[0], before - 4)


@pytest.mark.parametrize("scale", [None, 4.0])
@pytest.mark.parametrize("kind", ["negative", "zero"])
def test_a_gradient_that_is_not_what_its_memory_holds_is_read_right(accel, kind, scale):
    weight = nn.Parameter(torch.ones(3))
    optimizer = accel.optimizers.create("sgd", [weight], lr=1.0, route="native")
    gradient = torch.tensor([4.0, 8.0, -4.0])
    for number in range(2):
        weight.grad = torch._neg_view(gradient.clone()) if kind == "negative" else torch._efficientzerotensor(3)
        assert weight.grad.is_neg() is (kind == "negative")
        if scale is not None:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
        optimizer.step()
        moved = gradient * (number + 1) / (scale or 1) if kind == "negative" else torch.zeros(3)
        assert torch.equal(weight, 1 + moved)


def test_a_parameter_with_the_negative_bit_is_refused_until_it_is_resolved(accel):
    weight = nn.Parameter(torch.ones(3))
    optimizer = accel.optimizers.create("adamw", [weight], lr=0.1, route="native")
    train(optimizer, [weight], 1, start=1)
    memory, weight.data = weight.data, torch._neg_view(weight.data)
    before = memory.clone()
    for _ in range(2):
        with pytest.raises(TrainingError, match="resolve_neg"):
            train(optimizer, [weight], 1, start=2)
    assert torch.equal(memory, before)
    weight.data = weight.data.resolve_neg()
    train(optimizer, [weight], 1, start=3)


SHAPES = {
    "joined": lambda data: torch.cat([data, data]),
    "cut where it is": lambda data: data[:1],
    "transposed": lambda data: data.t(),
    "transposed copy": lambda data: data.t().contiguous(),
    "flat": lambda data: data.view(-1),
}


@pytest.mark.parametrize("name", ["adamw", "lamb", "sgd"])
def test_a_view_that_grew_where_it_is_is_refused(accel, name):
    """New rows at the same address would never be trained."""
    memory = torch.ones(6, 3)
    weight = nn.Parameter(memory[:2])
    options = {"momentum": 0.9} if name == "sgd" else {}
    optimizer = accel.optimizers.create(name, [weight], lr=0.1, route="native", **options)
    weight.grad = torch.ones(2, 3)
    optimizer.step()
    before = memory.clone()
    weight.data = memory
    assert weight.data_ptr() == memory.data_ptr()
    with pytest.raises(TrainingError, match="shape"):
        optimizer.step()
    weight.grad = torch.ones(6, 3)
    with pytest.raises(TrainingError, match="shape"):
        optimizer.step()
    assert torch.equal(memory, before)


@pytest.mark.parametrize("name", ["adamw", "lamb", "sgd"])
@pytest.mark.parametrize("change", SHAPES.values(), ids=list(SHAPES))
def test_a_parameter_that_changed_its_shape_is_refused(accel, change, name):
    weight, other = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4))
    optimizer = accel.optimizers.create(name, [weight, other], lr=0.1, route="native")
    gradient = torch.ones(2, 3)
    for parameter in (weight, other):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = [weight.data, weight.data.clone(), gradient.clone()]
    weight.data = change(weight.data)
    for _ in range(2):
        with pytest.raises(TrainingError, match="shape"):
            optimizer.step()
    assert torch.equal(before[0], before[1])
    weight.data = before[0]
    optimizer.step()
    assert not torch.equal(before[0], before[1])


def test_a_state_of_another_shape_is_refused(accel):
    weight = nn.Parameter(torch.ones(300))
    optimizer = accel.optimizers.create("adamw", [weight], lr=0.1, route="native")
    train(optimizer, [weight], 1, start=1)
    optimizer.state[weight]["exp_avg"].data = torch.ones(3)
    with pytest.raises(TrainingError, match="exp_avg"):
        train(optimizer, [weight], 1, start=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_what_a_scaler_found_is_read_in_any_dtype(accel, dtype):
    weight = nn.Parameter(torch.ones(3))
    optimizer = accel.optimizers.create("sgd", [weight], lr=1.0, route="native")
    weight.grad = torch.full((3,), 8.0)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(16.0, dtype=dtype), torch.tensor(1.0, dtype=dtype)
    optimizer.step()
    assert weight.tolist() == [1.0] * 3
    optimizer.found_inf = torch.tensor(0.0, dtype=dtype)
    optimizer.step()
    assert weight.tolist() == [0.5] * 3


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

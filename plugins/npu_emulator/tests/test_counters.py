"""The cost API: exact counts of launches, synchronisations and copies."""

import pytest
from accelcore_npu_emulator import counters, native

from accelcore.errors import BackendUnavailableError


@pytest.fixture
def torch(emulated_npu):
    import torch

    torch.zeros(1, device=emulated_npu)  # the first use initialises the device
    return torch


def test_one_operator_is_one_launch_and_no_synchronisation(torch):
    x = torch.ones(3, device="npu")
    with counters.count() as cost:
        x + 1
    assert cost.launches == {"aten::add.Tensor": 1}
    assert not cost.synchronizations
    assert not cost.copies


def test_reading_a_number_synchronizes(torch):
    x = torch.ones(3, device="npu")
    with counters.count() as cost:
        assert x.sum().item() == 3
    assert cost.launches["aten::sum"] + cost.launches["aten::sum.dim_IntList"] == 1
    assert cost.synchronizations == {"aten::_local_scalar_dense": 1}


def test_explicit_waits_are_told_apart(torch):
    event = torch.npu.Event()
    event.record()
    with counters.count() as cost:
        torch.npu.synchronize()
        torch.npu.current_stream().synchronize()
        event.synchronize()
    assert cost.synchronizations == {"device": 1, "stream": 1, "event": 1}
    assert not cost.launches


def test_copies_have_a_direction_and_bytes(torch):
    host = torch.arange(1000.0)
    with counters.count() as cost:
        there = host.to("npu")
        back = there.cpu()
    assert torch.equal(back, host)
    assert cost.copies == {"host to device": 1, "device to host": 1}
    assert cost.bytes == {"host to device": 4000, "device to host": 4000}
    assert cost.synchronizations.total() == 2  # pageable memory: both copies block


def test_blocks_nest(torch):
    x = torch.ones(3, device="npu")
    with counters.count() as outer:
        x + 1
        with counters.count() as inner:
            x * 2
    assert inner.launches == {"aten::mul.Tensor": 1}
    assert outer.launches == {"aten::add.Tensor": 1, "aten::mul.Tensor": 1}


def test_what_was_counted_before_an_error_stays(torch):
    def one_launch_and_an_error():
        torch.ones(3, device="npu").reshape(7)

    with pytest.raises(RuntimeError, match="shape"), counters.count() as cost:
        one_launch_and_an_error()
    assert cost.launches.total() == 1


def step_cost(torch, layers, foreach):
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(layers))).to("npu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
    x = torch.ones(2, 4, device="npu")
    with counters.count() as cost:
        model(x).sum().backward()
        optimizer.step()
    return cost


def test_a_training_step_costs_the_same_every_time(torch):
    costs = [step_cost(torch, layers=3, foreach=False) for _ in range(2)]
    assert costs[0] == costs[1]
    assert not costs[0].synchronizations


def test_a_step_costs_more_with_more_parameters(torch):
    few, many = (step_cost(torch, layers, foreach=False) for layers in (2, 6))
    assert few.launches["aten::add_.Tensor"] == 2
    assert many.launches["aten::add_.Tensor"] == 6


def test_counting_without_an_emulated_device_is_refused(monkeypatch):
    monkeypatch.setattr(native, "opened", lambda: None)
    with pytest.raises(BackendUnavailableError, match="cannot be counted"), counters.count():
        pass

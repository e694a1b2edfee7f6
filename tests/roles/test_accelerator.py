"""The runtime of a device beside the host, on a device that a test can look into."""

from __future__ import annotations

import collections
import dataclasses
from contextlib import nullcontext

import pytest
import torch

from accelcore.errors import UnsupportedError
from accelcore.roles.runtime import AcceleratorRuntime, TorchRuntime

DEVICE = torch.device("meta")


class Queue:
    """What torch's module of a device offers, and what was asked of it."""

    def __init__(self):
        self.synchronized, self.streams = [], 0

    def Stream(self, device):
        self.streams += 1
        return self

    def stream(self, stream):
        return nullcontext()

    def current_stream(self, device):
        return self

    def record_event(self):
        return None

    def wait_event(self, event):
        pass

    def synchronize(self, device=None):
        self.synchronized.append(device)


@pytest.fixture
def queue(monkeypatch):
    made = Queue()
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    return made


@pytest.fixture
def recorded(monkeypatch):
    """The tensors that must outlast their use on another stream than they were made on."""
    found = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: found.append(tensor))
    return found


class Encoding(collections.UserDict):
    """Moves itself, as a tokenizer's batch does."""

    def to(self, device):
        return Encoding({key: value.to(device) for key, value in self.items()})


class Hidden:
    """Moves itself, and shows nobody what it holds."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor):
        self._tensor = tensor

    def to(self, device):
        return Hidden(self._tensor.to(device))


@dataclasses.dataclass
class Record:
    tensor: object


class Named(dict):
    pass


T = torch.ones(3)
CONTAINERS = {
    "tensor": lambda tensor: tensor,
    "list": lambda tensor: [tensor],
    "nested": lambda tensor: {"a": ({"b": [tensor]},)},
    "dataclass": Record,
    "dataclass in a dataclass": lambda tensor: Record([Record(tensor)]),
    "dict of its own": lambda tensor: Named(a=tensor),
    "UserDict": lambda tensor: collections.UserDict(a=tensor),
    "what moves itself": lambda tensor: Encoding(a=tensor),
    "what hides": Hidden,
    "packed sequence": lambda tensor: torch.nn.utils.rnn.pack_sequence([tensor]),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_memory_of_the_transfers_outlasts_its_use_whatever_a_batch_is_made_of(queue, recorded, kind):
    ready = AcceleratorRuntime(DEVICE).prefetch(CONTAINERS[kind](T))
    assert recorded == []
    ready()
    assert [(tensor.device, tensor.shape) for tensor in recorded] == [(DEVICE, (3,))]


def test_what_was_there_already_is_not_the_transfers(queue, recorded):
    there = torch.ones(3, device=DEVICE)
    assert AcceleratorRuntime(DEVICE).prefetch([there])()[0] is there
    assert recorded == []


def test_a_device_without_streams_prefetches_and_refuses_streams(queue, recorded):
    runtime = AcceleratorRuntime(DEVICE, streams=False)
    assert runtime.prefetch({"a": T})()["a"].device == DEVICE
    assert queue.streams == 0
    with pytest.raises(UnsupportedError, match="no side streams on meta"):
        runtime.side_stream()


def test_the_runtimes_own_device_is_waited_for(queue):
    device = torch.device("meta", 1)
    TorchRuntime(device).synchronize()
    assert queue.synchronized == [device]

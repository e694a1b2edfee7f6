"""Conformance of the runtime role: the device, its random numbers, its memory, the way onto it."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelcore import Backend
from accelcore.testing.declared import declared

__all__ = ["TestRuntime"]

MEBIBYTE = 2**20


class Pair(NamedTuple):
    """A batch with names."""

    left: Tensor
    right: Tensor | None


@dataclass
class Record:
    """A batch of a user's own type."""

    tensor: Tensor
    name: str


def draw(accel: Backend) -> list[Any]:
    """Numbers from every generator that a training script draws from."""
    ones = torch.ones(64, device=accel.device)
    return [
        torch.randn(8, device=accel.device).cpu().tolist(),
        torch.nn.functional.dropout(ones, 0.5).cpu().tolist(),
        torch.randn(4).tolist(),
        random.random(),  # noqa: S311  # what is tested
        *_numpy(),
    ]


def _numpy() -> list[float]:
    """A number of NumPy's generator, which scripts and data sets draw from where NumPy is installed."""
    if find_spec("numpy") is None:
        return []
    import numpy

    return [float(numpy.random.random())]


class TestRuntime:
    """Seeds, random states, memory, transfers."""

    def test_seed(self, accel: Backend) -> None:
        """The same seed gives the same numbers on the device and the host, another seed gives others."""
        accel.runtime.seed(1)
        first = draw(accel)
        assert draw(accel) != first
        accel.runtime.seed(1)
        assert draw(accel) == first
        accel.runtime.seed(2)
        assert draw(accel) != first

    def test_random_state_replays(self, accel: Backend) -> None:
        """Putting a saved random state back repeats the numbers drawn since, on the device and the host."""
        accel.runtime.seed(3)
        draw(accel)
        state = accel.runtime.rng_state()
        expected = draw(accel)
        for _ in range(2):  # a state can be used again
            draw(accel)
            assert accel.runtime.set_rng_state(state) == []
            assert draw(accel) == expected

    def test_random_state_can_be_saved(self, accel: Backend) -> None:
        """A random state is CPU tensors by name, and neither drawing nor another one changes it."""
        state = accel.runtime.rng_state()
        assert state
        assert all(isinstance(name, str) for name in state)
        assert all(value.device.type == "cpu" for value in state.values())
        before = {name: value.clone() for name, value in state.items()}
        draw(accel)
        accel.runtime.rng_state()
        assert all(torch.equal(value, before[name]) for name, value in state.items())

    def test_random_state_of_another_device(self, accel: Backend) -> None:
        """What another kind of device saved is reported by name, and the rest is put back."""
        state = accel.runtime.rng_state()
        expected = draw(accel)
        unknown = accel.runtime.set_rng_state({**state, "a generator of another device": torch.zeros(8)})
        assert unknown == ["a generator of another device"]
        assert draw(accel) == expected

    def test_batches_move_whole(self, accel: Backend) -> None:
        """Every tensor of a nested batch arrives on the device; types, names and what is no tensor stay."""
        tensor = torch.arange(3.0)
        batch = {
            "tensor": tensor,
            "tuple": (tensor, "text", 7),
            "named": Pair(tensor, None),
            "list": [tensor, {"deep": tensor}],
            "ordered": OrderedDict(a=tensor),
            "record": Record(tensor, "name"),
        }
        moved: Any = accel.runtime.to_device(batch)
        assert moved["tuple"][1:] == ("text", 7)
        assert isinstance(moved["named"], Pair)
        assert moved["named"].right is None
        assert isinstance(moved["ordered"], OrderedDict)
        assert isinstance(moved["record"], Record)
        assert moved["record"].name == "name"
        arrived = [
            moved["tensor"], moved["tuple"][0], moved["named"].left, moved["list"][0], moved["list"][1]["deep"],
            moved["ordered"]["a"], moved["record"].tensor,
        ]  # fmt: skip
        for tensor_ in arrived:
            assert tensor_.device == accel.device, f"a tensor of the batch stayed on {tensor_.device}"
            assert tensor_.cpu().tolist() == [0.0, 1.0, 2.0]
        assert batch["tensor"] is tensor, "the batch itself was changed"

    def test_transfers_keep_values(self, accel: Backend) -> None:
        """Integers, booleans, empty and strided tensors arrive as they were."""
        for tensor in (
            torch.tensor([2**40, -1]),
            torch.tensor([True, False]),
            torch.empty(0, 3),
            torch.arange(12.0).reshape(3, 4).t(),
            torch.tensor(2.5),
            torch.tensor([2**31 - 1], dtype=torch.int32),
            torch.tensor([255], dtype=torch.uint8),
            *(torch.ones(2, dtype=getattr(torch, name)) / 3 for name in accel.capabilities.model_dtypes),
        ):
            moved = accel.runtime.to_device(tensor)
            assert moved.dtype == tensor.dtype
            assert moved.shape == tensor.shape
            assert torch.equal(moved.cpu(), tensor)

    def test_no_needless_copy(self, accel: Backend) -> None:
        """A tensor that is already there is not copied."""
        there = torch.ones(3, device=accel.device)
        assert accel.runtime.to_device([there])[0].data_ptr() == there.data_ptr()

    def test_synchronize(self, accel: Backend) -> None:
        """synchronize returns, and work queued before it is done."""
        total = torch.ones(256, 256, device=accel.device)
        for _ in range(4):
            total = total @ torch.full((256, 256), 1 / 256, device=accel.device)
        accel.runtime.synchronize()
        assert total.sum().item() == 256 * 256

    def test_memory(self, accel: Backend) -> None:
        """Memory figures are bytes, in order, and grow by what is allocated."""
        before = accel.runtime.memory()
        held = torch.ones(64 * MEBIBYTE // 4, device=accel.device)
        accel.runtime.synchronize()
        after = accel.runtime.memory()
        assert 0 <= before.used <= before.peak <= before.total
        assert 0 < after.used <= after.peak <= after.total
        assert after.total == before.total
        assert after.peak >= before.peak
        assert after.used - before.used > 48 * MEBIBYTE, "64 MiB were allocated, and the figure did not follow"
        del held
        # Up to what the host's own bookkeeping lags behind.
        assert accel.runtime.memory().peak > after.used - 16 * MEBIBYTE, "the peak fell when memory was freed"

    def test_prefetch(self, accel: Backend) -> None:
        """A batch whose transfer was begun ahead arrives whole, whatever is queued and dropped in between."""
        waiting = [accel.runtime.prefetch({"rows": torch.full((4096,), float(n)), "n": n}) for n in range(4)]
        for n, ready in enumerate(waiting):
            batch: Any = ready()
            assert batch["rows"].device == accel.device
            doubled = batch["rows"] * 2
            assert (batch["n"], doubled.sum().item()) == (n, 8192.0 * n)

    def test_side_stream(self, accel: Backend) -> None:
        """What is computed on a side stream can be used after it, in order."""
        with declared(accel.capabilities.streams, "side streams"):
            total = torch.zeros(1024, device=accel.device)
            for _ in range(8):
                with accel.runtime.side_stream():
                    total = total + 1
                total = total * 1
            assert total.sum().item() == 8 * 1024

    def test_pinned_memory(self, accel: Backend) -> None:
        """A pinned tensor is one, equals the original, and arrives on the device."""
        with declared(accel.capabilities.pinned_memory, "pinned memory"):
            tensor = torch.arange(1024.0)
            pinned = accel.runtime.pin(tensor)
            assert pinned.is_pinned()
            assert torch.equal(pinned, tensor)
            moved = accel.runtime.to_device(pinned)
            accel.runtime.synchronize()
            assert torch.equal(moved.cpu(), tensor)

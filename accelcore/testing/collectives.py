"""Conformance of the collectives role: alone the identity, together the sum."""

from __future__ import annotations

import pytest
import torch

from accelcore import Backend, ConfigurationError
from accelcore.environment import Launch
from accelcore.testing.declared import declared
from accelcore.testing.job import two_ranks

__all__ = ["TestCollectives"]


class TestCollectives:
    """One process, then a job of two."""

    def test_alone(self, accel: Backend) -> None:
        """In one process every collective is the identity, on the tensor itself."""
        with accel.distributed() as job:
            assert (job.rank, job.world_size) == (0, 1)
            tensor = torch.tensor([1.0, 2.0], device=accel.device)
            for op in ("sum", "avg", "min", "max"):
                assert job.all_reduce(tensor, op) is tensor
            assert job.broadcast(tensor) is tensor
            assert tensor.tolist() == [1.0, 2.0]
            job.barrier()
            assert job.cpu_group() is None

    def test_nonsense_is_refused(self, accel: Backend) -> None:
        """A reduction or a rank that does not exist is an error, alone too, where it would otherwise go unnoticed."""
        ones = torch.ones(2, device=accel.device)
        with pytest.raises(ConfigurationError):
            accel.collectives.all_reduce(ones, "no such reduction")  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError):
            accel.collectives.all_reduce(torch.ones(2, device=accel.device, dtype=torch.int64), "avg")
        with pytest.raises(ConfigurationError):
            accel.collectives.broadcast(ones, 1)

    def test_process_groups(self, accel: Backend) -> None:
        """A backend without process groups refuses a job of several ranks; one with them runs it."""
        with declared(bool(accel.capabilities.process_groups), "a process group"):
            if accel.capabilities.process_groups:
                found = two_ranks(accel, "collectives")
                assert [(rank["rank"], rank["world_size"]) for rank in found] == [(0, 2), (1, 2)]
                assert all(rank["device"].startswith(accel.device.type) for rank in found)
            else:
                accel.collectives.init(Launch(rank=0, world_size=2, local_rank=0, init_method="tcp://127.0.0.1:1"))

    @pytest.mark.parametrize(
        ("what", "expected"),
        [
            ("sum", [3.0, 30.0]),
            ("avg", [1.5, 15.0]),
            ("min", [1.0, -2.0]),
            ("max", [2.0, -1.0]),
            ("large", [3.0]),
            ("integers", [2**41 + 1]),
            ("inf", [True]),
            ("scalar", [3.0]),
            ("empty", []),
        ],
    )
    def test_all_reduce(self, accel: Backend, what: str, expected: list[float]) -> None:
        """all_reduce gives every rank the sum, average, minimum or maximum over all ranks."""
        for rank in _job(accel):
            assert rank[what] == expected

    def test_strided_views(self, accel: Backend) -> None:
        """all_reduce of a view changes the view's elements, in place."""
        for rank in _job(accel):
            assert rank["strided"] == [3.0, 12.0]
            assert rank["in_place"]

    def test_low_precision(self, accel: Backend) -> None:
        """Where models can be bf16, so can what is reduced."""
        if "bfloat16" not in accel.capabilities.model_dtypes:
            pytest.skip("not declared: models in bfloat16; the training part sees that the trainer refuses them")
        assert [rank["low"] for rank in _job(accel)] == [[3.0], [3.0]]

    def test_broadcast(self, accel: Backend) -> None:
        """broadcast gives every rank the tensor of the one that is named."""
        for rank in _job(accel):
            assert rank["broadcast"] == [1.0]
            assert rank["broadcast_1"] == [2.0]
            assert rank["overwritten"] == [[2.0] * 3, [2**40 + 1]], "in place, in a view, exactly"

    def test_barrier(self, accel: Backend) -> None:
        """No rank leaves a barrier before every rank has come to it."""
        first, _ = _job(accel)
        assert first["waited"]

    def test_job_is_closed(self, accel: Backend) -> None:
        """Behind `distributed()` the process group that it formed is gone, and another can be formed."""
        assert [rank["open"] for rank in _job(accel)] == [False, False]

    def test_cpu_group(self, accel: Backend) -> None:
        """The CPU group takes CPU tensors, whatever the device."""
        assert [rank["cpu_group"] for rank in _job(accel)] == [[3.0], [3.0]]


def _job(accel: Backend) -> list[dict[str, object]]:
    if not accel.capabilities.process_groups:
        pytest.skip("not declared: a process group; another test sees that a job of several ranks is refused")
    return two_ranks(accel, "collectives")

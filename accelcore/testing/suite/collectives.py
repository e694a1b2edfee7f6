"""Conformance of the collectives role: alone the identity, together the sum."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelcore import Backend, ConfigurationError, DistributedError
from accelcore.jobs.launchers import Launch
from accelcore.testing.support.declared import LOW_PRECISION, declared, refused
from accelcore.testing.support.job import three_ranks, two_ranks
from accelcore.testing.support.kinds import VIEWS
from accelcore.testing.support.large_collectives import COMBINED, EXCHANGES
from accelcore.testing.support.oracles import eps
from accelcore.testing.support.ranks import EXACT, OPERATIONS, as_real, base_of, reduced
from accelcore.testing.support.torch_collectives import CALLS, GROUPS, OF_GROUPS
from accelcore.testing.support.usable import DeviceTests

_ALONE = timedelta(seconds=5)  # how long a group waits for ranks that do not exist


class TestCollectives(DeviceTests):
    """One process, then jobs of two and of three."""

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
        """A reduction or a rank that does not exist is an error, also in one process."""
        ones = torch.ones(2, device=accel.device)
        with pytest.raises(ConfigurationError):
            accel.collectives.all_reduce(ones, "no such reduction")  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError):
            accel.collectives.all_reduce(torch.ones(2, device=accel.device, dtype=torch.int64), "avg")
        with pytest.raises(ConfigurationError):
            accel.collectives.broadcast(ones, 1)

    def test_process_groups(self, accel: Backend) -> None:
        """A backend with process groups runs a job of several ranks; another refuses it."""
        if accel.capabilities.process_groups:
            found = two_ranks(accel, "collectives")
            assert [(rank["rank"], rank["world_size"]) for rank in found] == [(0, 2), (1, 2)]
            assert all(rank["device"].startswith(accel.device.type) for rank in found)
            return
        with declared(False, "a process group"), tempfile.TemporaryDirectory() as folder:
            launch = Launch(rank=0, world_size=2, local_rank=0, init_method=f"file://{folder}/meet")
            try:
                accel.collectives.init(launch, timeout=_ALONE)
            except DistributedError as error:
                pytest.fail(f"unexpected success: it declares no process group, and waited for a second rank: {error}")

    def test_declared_process_groups(self, accel: Backend, tmp_path: Path) -> None:
        """Each process group that is declared can be formed and reduces tensors; the job is made of no other."""
        names = accel.capabilities.process_groups
        if not names:
            pytest.skip("not declared: a process group; another test sees that a job of several ranks is refused")
        with accel.distributed(rank=0, world_size=1, init_method=f"file://{tmp_path}/meet", timeout=_ALONE):
            if not dist.is_initialized():
                pytest.skip("this backend forms no group for one rank, in which the others could be tried")
            used = {part.rpartition(":")[2] for part in dist.get_backend_config().split(",")}
            assert used <= set(names), f"the job is made of {', '.join(sorted(used - set(names)))}, not declared"
            for name in names:
                try:
                    group = dist.new_group(backend=name, timeout=_ALONE)
                except Exception as error:
                    raise AssertionError(f"process_groups declares {name}, which cannot be formed") from error
                refusals = [_refusal(group, device) for device in (accel.device, torch.device("cpu"))]
                assert None in refusals, f"process_groups declares {name}, which reduces nothing: {refusals[0]}"
                dist.destroy_process_group(group)

    @pytest.mark.parametrize(
        ("what", "expected"),
        [
            *[("large", [3.0]), ("integers", [2**41 + 1]), ("inf", [True]), ("parameter", [3.0])],
            ("bounds", [-1.0, 1.0]),  # 0 is neither the largest nor the smallest
        ],
    )
    def test_all_reduce(self, accel: Backend, what: str, expected: list[float]) -> None:
        """all_reduce sums long tensors, parameters and 64-bit integers exactly, keeps inf, and finds bounds."""
        for rank in _job(accel):
            assert rank[what] == expected, "all_reduce gave something else than the sum, or the bound, over all ranks"

    @pytest.mark.parametrize("kind", VIEWS)
    @pytest.mark.parametrize("operation", OPERATIONS)
    def test_views(self, accel: Backend, operation: str, kind: str) -> None:
        """Every operation changes every kind of view in place, to the same result on all ranks, and nothing else.

        A view may be a leaf that requires a gradient.
        """
        bases = [base_of(rank) for rank in range(2)]
        together = _together(operation, *(VIEWS[kind](base.double()) for base in bases))
        for rank, base in zip(_job(accel), bases, strict=True):
            expected = base.clone()
            VIEWS[kind](expected).copy_(together)
            for (why, found), leaf in zip(rank["views"][f"{operation} {kind}"], ("a view", "a leaf"), strict=True):
                assert not why, f"{leaf}: {why}"
                same = VIEWS[kind](torch.tensor(found)).tolist() == VIEWS[kind](expected).tolist()
                assert same, f"{leaf} is not what was asked for"
                assert found == expected.tolist(), f"the neighbours of {leaf} were changed"

    def test_strides_of_ranks(self, accel: Backend) -> None:
        """Tensors of one shape and other strides on each rank are reduced, and gathered by torch, by their elements."""
        for rank in _job(accel):
            for found, factor in zip(rank["strides"], (3, 2, 2, 2), strict=True):
                expected = [[0.0, factor, 2 * factor], [3 * factor, 4 * factor, 5 * factor]]
                assert found == expected, f"of matrices in two strides it makes {found}"

    @pytest.mark.parametrize("call", CALLS)
    def test_calls_of_torch(self, accel: Backend, call: str) -> None:
        """torch's own collectives give each rank the rows that are its, also of unequal parts; some may be refused."""
        for rank, numbers in zip(_job(accel), CALLS[call][1], strict=True):
            found = rank["calls"][call]
            if isinstance(found, str):
                refused(found)
            assert found == [[each, -each] for each in numbers], f"by {call} rank {rank['rank']} gets {found}"

    @pytest.mark.parametrize("dtype", EXACT)
    def test_every_digit(self, accel: Backend, dtype: str) -> None:
        """Numbers that need every digit of their dtype, or lie at its ends, arrive exactly.

        A dtype that is not declared may be refused.
        """
        pair = [torch.tensor(values, dtype=getattr(torch, dtype)) for values in EXACT[dtype]]
        for rank in _job(accel):
            found = {key.split()[0]: value for key, value in rank["exact"].items() if key.split()[1] == dtype}
            for operation, value in found.items():
                if isinstance(value, str):
                    assert dtype not in accel.capabilities.model_dtypes, f"{operation} of {dtype} is {value}"
                    continue
                expected = as_real(_together(operation, *pair).to(pair[0].dtype)).tolist()
                assert value == expected, f"{operation} makes {value} of {EXACT[dtype]} in {dtype}, not {expected}"

    @pytest.mark.parametrize("dtype", LOW_PRECISION)
    def test_low_precision(self, accel: Backend, dtype: str) -> None:
        """Gradients can be summed and averaged in every dtype they come in; an average does not overflow."""
        if dtype not in reduced(accel):
            pytest.skip(f"not declared: {dtype}; other tests see that it is refused")
        bound = eps(getattr(torch, dtype))
        for rank in _job(accel):
            total, average = rank["low"][dtype]
            assert total == [3.0]
            assert average == pytest.approx([1.5, 6e4], rel=bound), "the average is none"

    @pytest.mark.parametrize("operation", [*COMBINED, *EXCHANGES])
    def test_large(self, accel: Backend, operation: str) -> None:
        """Large tensors of each dtype arrive whole, also in views and in unequal parts.

        A dtype that is not declared may be refused, and so may torch's own collectives.
        """
        required = accel.capabilities.model_dtypes if operation in OPERATIONS else ()
        wrong = [
            f"{operation} of large {dtype} tensors: {why}"
            for rank in _job(accel, "large")
            for dtype, why in rank[operation].items()
            if why and (dtype in required or not why.startswith("refused: "))
        ]
        assert not wrong, ", and ".join(wrong)

    def test_broadcast(self, accel: Backend) -> None:
        """broadcast gives every rank the tensor of the named rank, integers exactly, a large one whole."""
        for rank in _job(accel):
            assert rank["broadcast"] == [[1.0], [2.0], [2**40 + 1], [2.0]], "it is another rank's tensor"

    def test_gather(self, accel: Backend) -> None:
        """gather gives every rank the rows of all, however many each has, or none, from the device and from the CPU."""
        for rank in _job(accel):
            exact = [[2**40, 1], [2**40 + 1, 1], [2**40 + 1, 1]]
            assert rank["gathered"] == [exact, [1.0, 2.0, 2.0], [1.0, 2.0], [2.0]], (
                "what is gathered is not the rows of all ranks"
            )

    def test_words(self, accel: Backend) -> None:
        """A rank knows whether it is the main rank, and its local rank; means are over ranks."""
        for number, rank in enumerate(_job(accel)):
            assert rank["words"] == [number == 0, number, 1.5, [1.5, -1.5]], "a rank is not what it says, or a mean"

    def test_random_numbers(self, accel: Backend) -> None:
        """Ranks that seed alike draw the same numbers, each on its own device; ranks that do not, draw others."""
        (alike, own), (other_alike, other_own) = (rank["drawn"] for rank in _job(accel))
        assert alike == other_alike, "two ranks with one seed draw different numbers"
        assert own != other_own, "two ranks with two seeds draw the same numbers"

    def test_replica(self, accel: Backend) -> None:
        """A replicated module has rank 0's parameters, and in backward the mean of the ranks' gradients."""
        if "ddp" not in accel.capabilities.parallel:
            pytest.skip('not declared: parallel="ddp"')
        for rank in two_ranks(accel, "replicated"):
            assert rank["gradient"] == [1.5], "the ranks' gradients are apart"
            assert rank["weight"] == [1.0], "the ranks' parameters are apart"

    def test_barrier(self, accel: Backend) -> None:
        """No rank leaves a barrier before every rank has reached it."""
        first, _ = _job(accel)
        assert first["waited"], "a rank left the barrier before the other had come"

    def test_groups(self, accel: Backend) -> None:
        """In groups of two of three ranks, torch's collectives reach the group's ranks, from and to each of them."""
        _needs_process_groups(accel)
        for rank, found in enumerate(three_ranks(accel)):
            for members, dtype in product([each for each in GROUPS if rank in each], OF_GROUPS):
                numbers = {one: [one + 1, 10 * one] for one in members}
                total = [sum(each) for each in zip(*numbers.values(), strict=True)]
                expected = {"gathered": [*numbers.values()], "sum": [total]}
                for one in members:
                    expected |= {f"broadcast from {one}": [numbers[one]], f"sum for {one}": [total] * (rank == one)}
                for what, values in expected.items():
                    made = found[f"{members} {dtype}"][what]
                    assert made == values, f"{what} in the group of ranks {members} is {made}, not {values} in {dtype}"

    def test_job_is_closed(self, accel: Backend) -> None:
        """After `distributed()` the process group that it formed is destroyed, and another can be formed."""
        assert [rank["open"] for rank in _job(accel, "closed")] == [False, False]

    def test_timeout(self, accel: Backend) -> None:
        """A job that is formed again waits for a rank on the host as long as its `timeout`."""
        assert [rank["waits"] for rank in _job(accel, "closed")] == [False, False], "the limit of time does not count"

    def test_cpu_group(self, accel: Backend) -> None:
        """The CPU group takes CPU tensors, whatever the device."""
        assert [rank["cpu_group"] for rank in _job(accel)] == [[3.0], [3.0]]


def _together(operation: str, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the tensor that both ranks should have."""
    if operation == "broadcast":
        return second
    both = torch.stack([first, second])
    if operation in ("sum", "avg"):
        return both.sum(0) if operation == "sum" else both.mean(0)
    return both.amin(0) if operation == "min" else both.amax(0)


def _refusal(group: Any, device: torch.device) -> str | None:
    """Why a group of one rank does not reduce tensors there, or None."""
    try:
        tensor = torch.ones(2, device=device)
        dist.all_reduce(tensor, group=group)
        return None if tensor.tolist() == [1.0, 1.0] else f"it made {tensor.tolist()} of ones"
    except Exception as error:  # noqa: BLE001  # what a group of a third party's raises is of any kind
        return str(error)


def _job(accel: Backend, part: str = "collectives") -> list[dict[str, Any]]:
    _needs_process_groups(accel)
    return two_ranks(accel, part)


def _needs_process_groups(accel: Backend) -> None:
    if not accel.capabilities.process_groups:
        pytest.skip("not declared: a process group; another test sees that a job of several ranks is refused")

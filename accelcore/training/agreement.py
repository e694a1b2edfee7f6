"""What all ranks of a job do together or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

from accelcore.errors import AccelError, CheckpointError, DistributedError
from accelcore.roles.collectives import Collectives
from accelcore.roles.gathering import gather
from accelcore.training.differences import Differences

__all__ = ["Agreement"]


class Agreement:
    """Lets the ranks of a job meet, and know of each other's failures.

    Args:
        collectives: the job's.
        device: where tensors that are reduced have to be.
    """

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        self._collectives, self._device = collectives, device

    def meet(self, what: str) -> None:
        """Wait until every rank is here.

        Args:
            what: the call that all ranks have to make.

        Raises:
            DistributedError: some did not come in the time that the job gives a collective.
        """
        group = self._collectives.cpu_group()
        if group is None:
            return
        try:
            dist.monitored_barrier(group, wait_all_ranks=True)
        except ValueError:  # not every kind of group can say who is missing
            self._collectives.barrier()
        except RuntimeError as error:
            raise DistributedError(
                f"not every rank of the job came to {what}",
                why=str(error).strip().split("\n", 1)[0],
                remedy=f"call {what} on all ranks, and not under `if rank == 0:`",
            ) from error

    def train_alike(self, said: Mapping[str, str]) -> None:
        """Check that all ranks are about to train the same, by what each has `said` of it.

        Raises:
            DistributedError: on every rank, where one differs: which, and in what.
        """
        text = json.dumps(said).encode()
        if self.all_equal(int.from_bytes(hashlib.sha256(text).digest()[:7], "big")):
            return
        texts = gather(self._collectives, torch.frombuffer(bytearray(text + b"\n"), dtype=torch.uint8))
        differences = Differences([json.loads(line) for line in bytes(texts.tolist()).splitlines()])
        raise DistributedError(
            f"{differences.odd} of this job would not train what the others train",
            why=str(differences),
            remedy="give all ranks the same versions, model, optimizer and options",
        )

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A stage that all ranks leave alike: where one fails, all raise, and none waits for it."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001  # raised again below, when all ranks know
            failure = error
        self.settle(failure, what)

    def settle(self, failure: BaseException | None, what: str, kind: type[AccelError] = CheckpointError) -> None:
        """Raise this rank's failure, or that another rank has one."""
        failed = torch.tensor(failure is not None, dtype=torch.int32, device=self._device)
        self._collectives.all_reduce(failed, "max")
        if failure is not None:
            raise failure
        if failed.item():
            raise kind(f"another rank could not {what}", why="see that rank's error")

    def all_equal(self, value: int) -> bool:
        """Whether all ranks give the same number, below 2**62."""
        both = torch.tensor([value, -value], dtype=torch.int64, device=self._device)
        low, high = self._collectives.all_reduce(both, "min").tolist()
        return bool(low == -high)

    def of_rank_0(self, value: int) -> int:
        """Rank 0's number, on all ranks."""
        shared = torch.tensor(value, dtype=torch.int64, device=self._device)
        return int(self._collectives.broadcast(shared).item())

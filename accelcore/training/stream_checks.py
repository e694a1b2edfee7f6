"""Noticing, by its first batches, a stream that nobody divides among the ranks, or that is divided twice."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset

from accelcore.roles.collectives import Collectives
from accelcore.training.sharded_stream import ShardedStream

__all__ = ["StreamChecks"]

logger = logging.getLogger("accelcore")


class StreamChecks:
    """Looks at the first batches of a stream the first time it is read, and warns where rows get lost or come twice.

    Args:
        collectives: the job's.
        device: where tensors that are reduced have to be.
    """

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        self._collectives, self._device = collectives, device
        self._done = False

    def watch(self, loader: Any, batches: Iterator[Any], *, alike: bool) -> Iterator[Any]:
        """The same batches; `alike`: they are read by all ranks, which have to have the same."""
        if self._done:
            return batches
        self._done = True
        if alike:
            batches = self._alike(batches)
        dataset = getattr(loader, "dataset", None)
        divided = not isinstance(dataset, IterableDataset) or isinstance(dataset, ShardedStream)
        return batches if divided or getattr(loader, "num_workers", 0) < 2 else self._divided(batches)

    def _alike(self, batches: Iterator[Any]) -> Iterator[Any]:
        first = list(islice(batches, 1))  # of none, too, for all ranks have to come
        if not _same_on_all_ranks(first, self._collectives, self._device) and self._collectives.rank == 0:
            logger.warning(
                "the ranks do not read the same batches from this stream, and each takes one of every %d: rows get "
                "lost, or come twice. If it divides itself among the ranks, say trainer.batches(loader, shard=False); "
                "if it shuffles, let all ranks shuffle alike",
                self._collectives.world_size,
            )
        yield from chain(first, batches)

    def _divided(self, batches: Iterator[Any]) -> Iterator[Any]:
        before: list[Any] = []
        for batch in islice(batches, 2):
            if before and _equal(before, batch) and self._collectives.rank == 0:
                logger.warning(
                    "two workers of this loader begin with the same batch: each reads all of its iterable dataset, and "
                    "every row comes once a worker. Say DataLoader(accelcore.ShardedStream(dataset), ...), or divide "
                    "it in its __iter__ by torch.utils.data.get_worker_info()"
                )
            before = _tensors_of(batch)
            yield batch
        yield from batches


def _same_on_all_ranks(batch: Any, collectives: Collectives, device: torch.device) -> bool:
    """Whether all ranks have a batch of the same tensors, as far as their sums tell."""
    total = sum(float(leaf.detach().double().abs().sum()) for leaf in _tensors_of(batch))
    count = len(_tensors_of(batch))
    both = torch.tensor([total, -total, count, -count], dtype=torch.float32, device=device)
    low, high, fewest, most = collectives.all_reduce(both, "min").tolist()
    return bool(low == -high and fewest == -most)


def _equal(one: Any, other: Any) -> bool:
    """Whether two batches have tensors, and the same."""
    pairs = list(zip(_tensors_of(one), _tensors_of(other), strict=False))
    return bool(pairs) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def _tensors_of(batch: Any) -> list[Tensor]:
    """The tensors in a batch, however it nests them."""
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]

"""The way back to the state that an object had, by its own `load_state_dict`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

from accelcore.optim.shards import is_sharded, shard
from accelcore.training.parts.part import kind

__all__ = ["copied", "put_back"]


def put_back(load: Callable[[Any], Any], before: Any, now: Callable[[], Any]) -> None:
    """Load a state from before; where that raises, it is enough that all is as it was.

    What made a state's loading fail, such as a hook, is still there, and makes this fail, too.

    Args:
        load: takes a state.
        before: what to go back to; a copy.
        now: the state as it is.
    """
    try:
        load(before)
    except Exception:
        if not _same(now(), before):
            raise


def copied(tree: Any) -> Any:
    """A state that stays as it is; on the host, where there is more room."""
    if isinstance(tree, Tensor):
        return tree.detach().clone() if is_sharded(tree) else tree.detach().to("cpu", copy=True)
    if type(tree) is dict:
        return {key: copied(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(copied, tree))
    return copy.deepcopy(tree)


def _same(one: Any, other: Any) -> bool:
    """Whether two states are equal to the bit; NaN is equal to NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return kind(one) == kind(other) and _equal(shard(one).cpu(), shard(other).cpu())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and one != one:
        return isinstance(other, float) and other != other
    return type(one) is type(other) and bool(one == other)


def _equal(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())

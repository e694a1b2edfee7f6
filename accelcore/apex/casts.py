"""O1 for a whole script: from `amp.initialize` on, operators are cast wherever they are called, in no `with`.

apex replaces functions of torch, so that the loss behind the model, a second head, an evaluation are cast as the model
is. Here the thread that called `amp.initialize` stays in a region of autocast by table O1. It is suspended where apex
casts nothing, or should not: in backward passes and in steps of optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from accelcore.backend import Backend
from accelcore.precision.region import clear_cast_cache

__all__ = ["enter", "leave", "suspended"]

_DTYPE = torch.float16

_entered: dict[str, tuple[Backend, AbstractContextManager[object]]] = {}


def enter(backend: Backend) -> None:
    """Cast what this thread computes on a device from now on.

    Raises:
        UnsupportedError: the backend has no fp16 autocast by table O1.
    """
    kind = backend.device.type
    if kind not in _entered:
        region = backend.autocast(_DTYPE, table="O1")
        region.__enter__()
        _entered[kind] = backend, region


def leave() -> None:
    """Cast nothing any more."""
    while _entered:
        _, (_, region) = _entered.popitem()
        region.__exit__(None, None, None)


@contextmanager
def suspended() -> Iterator[None]:
    """A context in which nothing is cast; weights are cast anew after it."""
    with ExitStack() as stack:
        for backend, _ in _entered.values():
            stack.enter_context(backend.autocast(enabled=False))
        try:
            yield
        finally:
            if _entered:
                clear_cast_cache()

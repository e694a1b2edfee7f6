"""State of `amp.initialize` in this process: the loss scalers, and the region of O1.

apex replaces functions of torch, so that it also casts the loss, a second head, or an evaluation. Here the thread that
calls `amp.initialize` stays in a region of autocast by table O1. The region is suspended where apex casts nothing, or
should not: in backward passes and in optimizers' steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from accelcore.apex.loss_scaling import AmpScaler
from accelcore.backend import Backend
from accelcore.errors import AmpError
from accelcore.precision.o1.region import clear_cast_cache

__all__ = ["State", "casts_suspended", "enter_o1", "leave_o1", "listed", "state"]

_DTYPE = torch.float16

_entered: dict[str, tuple[Backend, AbstractContextManager[object]]] = {}


@dataclass
class State:
    """State of the process, as in apex. Scripts read `amp._amp_state.loss_scalers`.

    Attributes:
        enabled: None before the first `initialize`.
        loss_scalers: one for each loss.
    """

    enabled: bool | None = None
    loss_scalers: list[AmpScaler] = field(default_factory=list)


state = State()


def enter_o1(backend: Backend) -> None:
    """From now on, cast what this thread computes on a device.

    Raises:
        UnsupportedError: the backend has no fp16 autocast by table O1.
    """
    kind = backend.device.type
    if kind not in _entered:
        region = backend.autocast(_DTYPE, table="O1")
        region.__enter__()
        _entered[kind] = backend, region


def leave_o1() -> None:
    """Stop casting on all devices."""
    while _entered:
        _, (_, region) = _entered.popitem()
        region.__exit__(None, None, None)


@contextmanager
def casts_suspended() -> Iterator[None]:
    """Cast nothing inside this context; afterwards, weights are cast again."""
    with ExitStack() as stack:
        for backend, _ in _entered.values():
            stack.enter_context(backend.autocast(enabled=False))
        try:
            yield
        finally:
            if _entered:
                clear_cast_cache()


def listed(given: Any, kind: type, word: str) -> list[Any]:
    """Return one or several objects as a list; raise AmpError if one is not of `kind`."""
    if given is None:
        return []
    many = list(given) if isinstance(given, list | tuple) else [given]
    for each in many:
        if not isinstance(each, kind):
            raise AmpError(f"a {type(each).__name__} was given as {word}", remedy=f"give one {word}, or a list of them")
    return many

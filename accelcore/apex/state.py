"""State of `amp.initialize` in this process: the backends by device, the loss scalers, and the region of O1.

apex replaces functions of torch, so that it also casts the loss, a second head, or an evaluation. Here the thread that
calls `amp.initialize` stays in a region of autocast by table O1. The region is suspended where apex casts nothing, or
should not: in backward passes and in optimizers' steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from accelcore.backend import Backend
from accelcore.devices.select import select
from accelcore.errors import AmpError, CheckpointError, logger
from accelcore.precision.o1.autocast import clear_cast_cache, is_o1_active
from accelcore.precision.policy import Policy, create_scaler
from accelcore.scaling.contract import FindBad, LossScaler
from accelcore.scaling.dynamic import LossScale

_replicate = nn.DataParallel.replicate
_entered: dict[str, tuple[Backend, AbstractContextManager[object]]] = {}


class AmpScaler:
    """Loss scale of one of a script's losses, with apex's behaviour: it unscales after each backward pass."""

    # To set another attribute of apex's scalers, such as `_scale_seq_len`, raises an error instead of doing nothing.
    __slots__ = ("dynamic", "inner", "passes", "trusts_kernels")

    def __init__(self, backend: Backend, policy: Policy) -> None:
        self.dynamic = isinstance(policy.loss_scale, LossScale)
        self.inner: LossScaler = create_scaler(backend.scaler, policy)
        self.trusts_kernels = bool(getattr(self.inner, "trusts_kernels", False))
        self.inner.takes_fp16 = True  # without masters, as at O3; masters are unscaled in fp32
        self.passes = 0  # backward passes that have moved the scale, or could have

    def loss_scale(self) -> float:
        """Return the scale; waits for the device if it is dynamic."""
        return self.inner.get_scale()

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, in fp32, to call backward on."""
        return self.inner.scale(loss.float())

    def close(self, find_bad: FindBad) -> Tensor | None:
        """Update the scale at the end of a backward pass; return 1.0 if it overflowed, None if that is not checked."""
        found = self.inner.overflowed
        self.inner.update(find_bad)
        self.passes += 1
        return found

    def state(self) -> dict[str, Any]:
        """Return the state in apex's format."""
        state = self.inner.state_dict()
        return {"loss_scale": state.get("scale", 1.0), "unskipped": state.get("_growth_tracker", 0)}

    def load(self, state: dict[str, Any]) -> None:
        """Load a state in apex's format. A static scale is kept, with a warning if the saved one differs."""
        if set(state) != {"loss_scale", "unskipped"}:
            raise CheckpointError(
                f"the state of a loss scaler has {', '.join(sorted(map(str, state))) or 'nothing'}",
                why="apex's has loss_scale and unskipped",
                remedy="load what amp.state_dict() returned",
            )
        if self.dynamic:
            self.inner.load_state_dict(state)
        elif state["loss_scale"] != self.loss_scale():
            given, own = state["loss_scale"], self.loss_scale()
            logger.warning("saved loss scale %g is not used: this run has loss_scale=%g", given, own)


@dataclass
class State:
    """State of the process, as in apex. Scripts read `amp._amp_state.loss_scalers`."""

    enabled: bool | None = None  # None before the first `initialize`
    loss_scalers: list[AmpScaler] = field(default_factory=list)  # one for each loss


state = State()


def enter_o1(backend: Backend) -> None:
    """From now on, cast what this thread computes on a device."""
    kind = backend.device.type
    if kind not in _entered:
        region = backend.autocast(torch.float16, table="O1")
        region.__enter__()
        _entered[kind] = backend, region
        nn.DataParallel.replicate = _replicate_in_o1  # type: ignore[method-assign]


def _replicate_in_o1(self: nn.DataParallel[Any], module: Any, device_ids: Any) -> list[Any]:
    """Return replicas that cast by table O1 in their own threads, if this thread does so now."""
    replicas = _replicate(self, module, device_ids)
    casting = [backend for kind, (backend, _) in _entered.items() if is_o1_active() and torch.is_autocast_enabled(kind)]
    for replica in replicas:
        replica.__dict__["forward"] = partial(_forward_in_o1, casting, replica.forward)
    return replicas


def _forward_in_o1(casting: Iterable[Backend], forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    with ExitStack() as stack:
        for backend in casting:
            stack.enter_context(backend.autocast(torch.float16, table="O1"))
        return forward(*inputs, **named)


def leave_o1() -> None:
    """Stop casting on all devices."""
    while _entered:
        _, (_, region) = _entered.popitem()
        region.__exit__(None, None, None)
    nn.DataParallel.replicate = _replicate  # type: ignore[method-assign]


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


_selected = cache(select)


def backend_of(tensors: Iterable[Tensor]) -> Backend:
    """Return the backend of the tensors' device; without tensors, the CPU's."""
    devices = {tensor.device: None for tensor in tensors} or {torch.device("cpu"): None}
    if len(devices) > 1:
        raise AmpError(
            f"there are parameters on {' and '.join(map(str, devices))}",
            why="models that are trained together and their optimizers' state must be on one device",
            remedy="move all models to it before amp.initialize: model.to(device)",
        )
    return _selected(str(next(iter(devices))))


def listed(given: Any, kind: type, word: str) -> list[Any]:
    """Return one or several objects as a list; raise AmpError if one is not of `kind`."""
    if given is None:
        return []
    many = list(given) if isinstance(given, list | tuple) else [given]
    for each in many:
        if not isinstance(each, kind):
            raise AmpError(f"a {type(each).__name__} was given as {word}", remedy=f"give one {word}, or a list of them")
    return many

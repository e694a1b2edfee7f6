"""apex.amp on any device: mixed precision for scripts that call `amp.initialize` and `amp.scale_loss`.

    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0)
    ...
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

docs/apex.md lists the differences from apex.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.apex.initialize import initialize
from accelcore.apex.prepared import is_prepared, prepared_of
from accelcore.apex.state import casts_suspended, leave_o1, listed
from accelcore.apex.state import state as _amp_state
from accelcore.errors import AmpError, CheckpointError, logger
from accelcore.precision.o1.registration import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from accelcore.util.text import is_whole

__all__ = [
    "disable_casts", "float_function", "half_function", "initialize", "load_state_dict", "master_params",
    "promote_function", "register_float_function", "register_half_function", "register_promote_function", "reset",
    "scale_loss", "state_dict",
]  # fmt: skip


_PREFIX = "loss_scaler"


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yield the scaled loss, in fp32, to call `backward()` on inside this context.

    On leaving, the gradients are unscaled in fp32, and added to the gradients of earlier passes. If one of them has
    overflowed, each of the optimizers skips its next step, once.

    Args:
        loss: of any shape and dtype.
        optimizers: all optimizers of parameters that this loss depends on.
        loss_id: the index of the loss scale.
        model: not used, as in apex.
        delay_unscale: leave the gradients scaled; the next pass unscales the sum. For all but the last pass of an
            accumulation.
        delay_overflow_check: ignored: an overflow counts in its own pass.

    Raises:
        AmpError: `initialize` was not called, or not with this optimizer; there is no such `loss_id`; the gradients
            have another scale. It is a RuntimeError, too.
    """
    if _amp_state.enabled is None:
        raise AmpError("amp.scale_loss before amp.initialize", remedy="call amp.initialize(model, optimizer) first")
    if not _amp_state.enabled:
        yield loss
        return
    scalers = _amp_state.loss_scalers
    if not is_whole(loss_id) or loss_id >= len(scalers):
        raise AmpError(
            f"loss_id={loss_id!r} does not exist",
            available=f"0 to {len(scalers) - 1}",
            remedy="pass num_losses to amp.initialize",
        )
    given = dict.fromkeys(listed(optimizers, Optimizer, "optimizer"))
    scaler, trained = scalers[loss_id], list(map(prepared_of, given))
    for each in trained:
        each.begin(scaler)
    with casts_suspended():
        try:
            yield scaler.scale(loss)
            if delay_unscale:
                for each in trained:
                    each.delay(scaler)
                return
            for each in trained:
                each.end(scaler)
            names = (each.first_not_finite() for each in trained)
            found = scaler.close(lambda: next(filter(None, names), None))
        except BaseException:
            scaler.inner.abandon()
            for each in trained:
                each.drop()
            raise
    for each in trained:
        each.record_overflow(found, scaler)


def state_dict(destination: MutableMapping[str, Any] | None = None) -> MutableMapping[str, Any]:
    """Return the loss scales in apex's format: `{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 12}}`.

    Args:
        destination: a mapping to write them to.
    """
    state: MutableMapping[str, Any] = OrderedDict() if destination is None else destination
    for number, scaler in enumerate(_amp_state.loss_scalers):
        state[f"{_PREFIX}{number}"] = scaler.state()
    return state


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Load saved loss scales, after `initialize`. If their number differs, a warning is logged.

    Raises:
        CheckpointError: the state does not have the format of `state_dict`.
    """
    scalers = _amp_state.loss_scalers
    names = [f"{_PREFIX}{number}" for number in range(len(scalers))]
    strange = [name for name in state if not name.startswith(_PREFIX)]
    if strange:
        raise CheckpointError(
            f"the state of amp has unknown entries: {', '.join(map(str, strange))}",
            available=f"{_PREFIX}0, {_PREFIX}1, ...",
        )
    if len(state) != len(scalers):
        logger.warning("the saved state of amp has %d loss scales, and this run %d", len(state), len(scalers))
    for name, scaler in zip(names, scalers, strict=True):
        if name in state:
            scaler.load(state[name])


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the tensors that an optimizer updates: fp32 masters if it has them, else the parameters.

    Clip these: `clip_grad_norm_(amp.master_params(optimizer), 1.0)`.
    """
    if is_prepared(optimizer):
        yield from prepared_of(optimizer).masters
        return
    for group in optimizer.param_groups:
        yield from group["params"]


disable_casts = casts_suspended


def reset() -> None:
    """Undo `initialize`: O1 ends, and the loss scales are gone. apex has no such function.

    Models and optimizers stay as they are. `accelcore.precision.reset()` removes kernels and registrations.
    """
    leave_o1()
    _amp_state.enabled, _amp_state.loss_scalers = None, []

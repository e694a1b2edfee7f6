"""Contract of loss scalers, their count of overflows, their states, and the two scalers that look for none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelcore.errors import CheckpointError, ConfigurationError, TrainingError, logger

__all__ = ["LossScaler", "NoScaler", "StaticScaler", "described"]

Given = Sequence[Tensor] | None  # gradients that a scaler reads; None: those of the optimizer's parameters

AnyRank = Callable[[Tensor], Tensor] | None
"""Function of 1.0 if this rank found an overflow, which returns 1.0 if any rank did; None: this rank decides alone."""

FindBad = Callable[[], "str | None"]
"""Function that returns the name of the first parameter whose gradient is not finite; None if all are finite."""

VERSION = 1  # version of the states written here. States of other libraries have none.

OF_APEX = {"loss_scale", "unskipped"}  # keys of a state of apex, which are the same for static and dynamic scales

MARK = "is_scaled"  # in the `__dict__` of a scaled loss: a trainer scales by itself, and refuses it

_PATIENCE = 20
"""Overflows in a row before a warning. The search for the first scale takes at most sixteen halvings of the default."""

# Called for every gradient in every step, so without a Python frame for each.
_DTYPE, _IS_SPARSE, _GRAD = attrgetter("dtype"), attrgetter("is_sparse"), attrgetter("grad")


class LossScaler(ABC):
    """Loss scale of a training. A step calls `scale`, `unscale_` if gradients are read, `step`, `update` in this order.

    With several optimizers, `unscale_` and `step` are called for each, and `update` once. All have one scale. Only the
    optimizers whose own gradients overflowed skip the step. An optimizer that needs a closure is refused, because it
    computes its loss several times a step.

    `unscale_` and `step` read the gradients of the optimizer's parameters unless `gradients` are given. A trainer gives
    the memory in which they are, and `any_rank`, the strategy's `agree`: for sharded gradients it makes one rank's
    overflow every rank's.

    Attributes:
        reads_gradients: whether the scaler reads gradients at all.
        takes_fp16: whether fp16 gradients are accepted. They are refused by default, because dividing them by the scale
            loses small values.
        streak: its count of overflows in a row, for `warn`; None if it skips nothing.
    """

    reads_gradients = True
    takes_fp16 = False
    streak: OverflowStreak | None = None

    @abstractmethod
    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to call backward on."""

    @abstractmethod
    def unscale_(self, optimizer: Optimizer, gradients: Given = None, any_rank: AnyRank = None) -> None:
        """Divide the gradients by the scale in place. Call it before gradients are clipped or read."""

    @abstractmethod
    def step(self, optimizer: Optimizer, gradients: Given = None, any_rank: AnyRank = None) -> None:
        """Update the parameters with unscaled gradients, unless a gradient overflowed."""

    @abstractmethod
    def update(self, find_bad: FindBad | None = None, *, captured: bool = False) -> None:
        """Choose the next scale. Call it once a step, after the last optimizer's `step`.

        Args:
            find_bad: returns the name of the first parameter with a gradient that is not finite. None looks among the
                parameters of the optimizers.
            captured: whether a graph may record this call. Then `warn` is called after each replay, on the host.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state, which may be empty. It has the keys of torch.amp.GradScaler's, which can load it."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; raises CheckpointError if the state is that of another kind of scaler."""

    def abandon(self) -> None:  # most scalers keep nothing during a step
        """Forget a step that has failed, so that the next one can begin."""

    @property
    def overflowed(self) -> Tensor | None:
        """1.0 if a gradient of this step overflowed, else 0.0; None before `unscale_` or `step`, and after `update`."""
        return None

    @final
    def warn(self, find_bad: FindBad | None = None) -> None:
        """Log if many updates in a row were skipped. `update` calls it, but not in a step that a graph records.

        Without `find_bad` the log has no name: a replayed graph has cleared its gradients.
        """
        if self.streak is not None and self.streak.is_due():
            self.streak.log(self.get_scale(), find_bad)

    @final
    def takes(self, state: Mapping[str, Any]) -> bool:
        """Return whether a state, complete or not, is that of this kind of scaler."""
        own = self.state_dict()
        if not (own and state):
            return not own and not state
        if is_static(own):
            return is_static(state) and _scale_of(state) == _scale_of(own)
        return set(state) == OF_APEX or not is_static(state)

    @final
    def is_enabled(self) -> bool:
        """Return whether there is a loss scale, static or dynamic."""
        return self.reads_gradients

    @final
    def get_scale(self) -> float:
        """Return the loss scale; 1.0 if there is none. This waits for the device."""
        return float(self.state_dict().get("scale", 1.0))

    @property
    @final
    def skipped(self) -> int:
        """Number of updates skipped so far. Reading it waits for the device."""
        return int(self.state_dict().get("skipped", 0))


class NoScaler(LossScaler):
    """Scaler for fp32 and bf16, which have the exponent range to need no scale."""

    reads_gradients = False

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def unscale_(self, optimizer: Optimizer, gradients: Given = None, any_rank: AnyRank = None) -> None:
        pass

    def step(self, optimizer: Optimizer, gradients: Given = None, any_rank: AnyRank = None) -> None:
        refuse_closure(gradients)
        optimizer.step()

    def update(self, find_bad: FindBad | None = None, *, captured: bool = False) -> None:
        check_find_bad(find_bad)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise CheckpointError(
                "the checkpoint has the state of a loss scaler, and this training has none",
                remedy="train with the precision that the checkpoint was saved with",
            )


class StaticScaler(LossScaler):
    """Fixed loss scale. It never looks for overflows and never skips, as in apex with a number for `loss_scale`."""

    def __init__(self, scale: float) -> None:
        self._scale, self._has_scaled = scale, False
        self._unscaled: set[int] = set()
        self._inverses: dict[tuple[torch.dtype, torch.device], float | Tensor] = {}

    def scale(self, loss: Tensor) -> Tensor:
        self._has_scaled = True
        return marked(loss * self._scale)

    def unscale_(self, optimizer: Optimizer, gradients: Given = None, any_rank: AnyRank = None) -> None:
        if id(optimizer) in self._unscaled:
            raise TrainingError(
                "unscale_ was called twice for one optimizer since the last update",
                remedy="call it once before scaler.step(optimizer), and scaler.update() after",
            )
        given = by_dtype(gradients_of(optimizer, scaled=self._has_scaled) if gradients is None else gradients)
        if not self.takes_fp16:
            refuse_fp16(given)
        self._unscaled.add(id(optimizer))
        for members in given.values():
            torch._foreach_mul_(members, self._inverse(members[0]))  # type: ignore[call-overload]

    def step(self, optimizer: Optimizer, gradients: Given = None, any_rank: AnyRank = None) -> None:
        refuse_closure(gradients)
        if id(optimizer) not in self._unscaled:
            self.unscale_(optimizer, gradients)
        optimizer.step()

    def update(self, find_bad: FindBad | None = None, *, captured: bool = False) -> None:
        check_find_bad(find_bad)
        self._unscaled.clear()

    def abandon(self) -> None:
        self._unscaled.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale, "dynamic": False, "version": VERSION}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_version(state)
        if not is_static(state):
            raise CheckpointError(
                f"the checkpoint has {described(state)}, and this training has a static one",
                remedy="train with the loss_scale and the precision that the checkpoint was saved with",
            )
        saved = _scale_of(state)
        if saved != self._scale:
            raise CheckpointError(
                f"the checkpoint was saved with loss_scale={saved}, and this training has {self._scale}",
                remedy="train with the loss scale that the checkpoint was saved with",
            )

    def _inverse(self, like: Tensor) -> float | Tensor:
        """Return the factor, as a tensor if the dtype is exact enough: kernels for tensors are faster."""
        key = like.dtype, like.device
        if key not in self._inverses:
            exact = like.dtype.itemsize >= 4
            self._inverses[key] = torch.full((), 1 / self._scale, device="cpu").to(like) if exact else 1 / self._scale
        return self._inverses[key]


class OverflowStreak:
    """Count overflows in a row without waiting for the device.

    If a kernel skips steps, only the device knows. It copies its count to the host, which reads it some steps later.
    """

    def __init__(self) -> None:
        self._length, self._warns_at = 0, _PATIENCE
        self._count: Tensor | None = None
        self._count_on_host: Tensor | None = None

    def count(self, found: Tensor, known: Sequence[bool | None]) -> None:
        """Count a step. `found`: 1.0 if it overflowed, on the device; `known`: the same of each optimizer, or None."""
        if None not in known:
            self._length, self._count_on_host = self._length + 1 if any(known) else 0, None
            return
        if self._count is None or self._count_on_host is None:
            self._count = torch.zeros((), device=found.device)
            on_host = found.device.type == "cpu"
            self._count_on_host = self._count if on_host else torch.zeros((), device="cpu", pin_memory=True)
        torch.addcmul(found, self._count, found, out=self._count)
        if self._count_on_host is not self._count:
            self._count_on_host.copy_(self._count, non_blocking=True)

    def is_due(self) -> bool:
        """Return whether to warn: after every `_PATIENCE` overflows in a row."""
        if self._count_on_host is not None:
            self._length = int(self._count_on_host.numpy())  # `item()` would wait for the device
        if self._length < _PATIENCE:
            self._warns_at = _PATIENCE
        if self._length < self._warns_at:
            return False
        self._warns_at = self._length + _PATIENCE
        return True

    def log(self, scale: float, find_bad: FindBad | None) -> None:
        """Log the count, the loss scale, and, if `find_bad` is given, the first parameter that overflowed."""
        name = None if find_bad is None else find_bad()
        where = f"The first inf or NaN gradient is that of {name}" if name else "No gradient is inf or NaN now"
        if find_bad is None:
            where = "Train without graph=True to see which parameter's gradient is inf or NaN first"
        logger.warning(
            "%d updates in a row were skipped because gradients overflowed. The loss scale is %g. %s. Look for an "
            "inf or NaN in losses and activations, lower the learning rate, or train in bf16",
            *(self._length, scale, where),
        )


def marked(scaled: Tensor) -> Tensor:
    """Note on a loss that it is scaled."""
    scaled.__dict__[MARK] = True
    return scaled


def gradients_of(optimizer: Optimizer, *, scaled: bool) -> list[Tensor]:
    """Return an optimizer's gradients, of sparse ones the values; raise TrainingError unless a loss was `scaled`."""
    found = resolved([p for group in optimizer.param_groups for p in group["params"] if p.grad is not None])
    if found and not scaled:
        raise TrainingError(
            "this loss scaler has never scaled a loss, and would divide the gradients by its scale",
            remedy="call backward on the scaled loss: scaler.scale(loss).backward()",
        )
    if True in map(_IS_SPARSE, found):
        return [gradient._values() if gradient.is_sparse else gradient for gradient in found]
    return found


def resolved(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the parameters, which all have one.

    Complex arithmetic may leave torch's negative or conjugate bit on a gradient. A kernel that changes many tensors
    refuses it, so that gradient is replaced by one whose memory holds its values.
    """
    found: list[Tensor] = list(map(_GRAD, parameters))
    if True in map(Tensor.is_neg, found) or True in map(Tensor.is_conj, found):
        found = [gradient.resolve_neg().resolve_conj() for gradient in found]
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
    return found


def by_dtype(gradients: Sequence[Tensor]) -> Mapping[torch.dtype, Sequence[Tensor]]:
    """Group gradients by dtype, because a fused kernel takes one dtype. Complex ones become pairs of real numbers."""
    dtypes = set(map(_DTYPE, gradients))
    if any(dtype.is_complex for dtype in dtypes):
        return by_dtype([torch.view_as_real(each) if each.is_complex() else each for each in gradients])
    if len(dtypes) == 1:
        return {dtypes.pop(): gradients}
    return {dtype: [each for each in gradients if each.dtype == dtype] for dtype in dtypes}


def refuse_fp16(dtypes: Iterable[torch.dtype]) -> None:
    """Raise TrainingError if gradients are fp16."""
    if torch.float16 in dtypes:
        raise TrainingError(
            "the gradients are fp16",
            why="dividing them by the loss scale in fp16 would lose small values",
            remedy="keep the parameters in fp32 and let autocast choose the dtype of each operator, or train fp32 "
            'masters: precision="O2"',
        )


def check_find_bad(find_bad: object) -> None:
    """Raise ConfigurationError if `update` got a number, as torch's `update(new_scale)` does."""
    if find_bad is not None and not callable(find_bad):
        raise ConfigurationError(
            f"scaler.update({find_bad!r}) cannot set the loss scale: the argument is a function, `find_bad`",
            remedy="choose the first scale by accel.scaler.create(init=2.0), and call scaler.update() without it; to "
            'set a dynamic scale later: scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})',
        )


def refuse_closure(gradients: object) -> None:
    """Raise TrainingError if `step` was called with a closure, which torch's optimizers accept."""
    if callable(gradients):
        raise TrainingError(
            "a loss scaler cannot step an optimizer with a closure",
            why="a closure computes the loss several times a step, which is unscaled once",
            remedy="compute the loss before step; or train in fp32 or bf16, without a loss scale",
        )


def step_in_kernel(
    optimizer: Any, found_inf: Tensor | None, grad_scale: Tensor | None, step: Callable[[], Any] | None = None
) -> Any:
    """Call `step`, by default the optimizer's own. Its kernel divides the gradients and skips an overflow."""
    optimizer.found_inf, optimizer.grad_scale = found_inf, grad_scale
    try:
        return (step or optimizer.step)()
    finally:
        del optimizer.found_inf, optimizer.grad_scale


def is_static(state: Mapping[str, Any]) -> bool:
    """Return whether this may be the state of a static scale; apex writes the same for both kinds."""
    return set(state) == OF_APEX or ("dynamic" in state and not state["dynamic"])


def described(state: Mapping[str, Any]) -> str:
    """Return a state as text, such as `a dynamic loss scale of 65536.0`."""
    if not state:
        return "no loss scale"
    return f"a {'static' if is_static(state) else 'dynamic'} loss scale of {_scale_of(state)}"


def check_version(state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if another version of accelcore wrote the state."""
    version = state.get("version", VERSION)
    if version != VERSION:
        raise CheckpointError(
            f"the state of the loss scaler has version {version!r}, and this accelcore reads version {VERSION}",
            remedy="load it with the version of accelcore that saved it",
        )


def _scale_of(state: Mapping[str, Any]) -> Any:
    return state.get("scale", state.get("loss_scale"))

"""Settings of a dynamic loss scale."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

from accelcore.errors import ConfigurationError
from accelcore.util.text import is_number

__all__ = ["LossScale"]


@dataclass(frozen=True)
class LossScale:
    """Start and movement of a dynamic loss scale. torch.amp.GradScaler has the same defaults, and no bounds.

    Attributes:
        init: the scale of the first step.
        growth: factor of the scale after `interval` clean steps in a row.
        backoff: factor of the scale after an overflow.
        interval: number of clean steps until the scale grows.
        min, max: bounds of the scale. As in Ascend's apex, max is 2**24.

    Raises:
        ConfigurationError: no dynamic scale can work with these settings.
    """

    init: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    min: float = 1.0
    max: float = 2.0**24

    def __post_init__(self) -> None:
        if not (all(map(is_number, astuple(self))) and self._works()):
            raise ConfigurationError(
                f"no loss scale can work with {self}",
                remedy="choose 0 < min <= init <= max, growth > 1, 0 < backoff < 1 and a whole interval >= 1",
            )

    def _works(self) -> bool:
        bounded = 0 < self.min <= self.init <= self.max < math.inf
        moves = 1 < self.growth < math.inf and 0 < self.backoff < 1
        return bounded and moves and isinstance(self.interval, int) and self.interval >= 1

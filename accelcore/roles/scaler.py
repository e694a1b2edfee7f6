"""Loss scaling: keeping small fp16 gradients representable, and skipping a step that overflowed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from accelcore.errors import ConfigurationError
from accelcore.roles.grad_scaler import GradScaler
from accelcore.roles.loss_scale import LossScale
from accelcore.roles.loss_scaler import LossScaler, NoScaler, StaticScaler
from accelcore.roles.scaler_state import described

__all__ = ["GradScaler", "LossScale", "LossScaler", "NoScaler", "Scalers", "StaticScaler", "described"]


class Scalers:
    """Makes loss scalers for one device.

    Args:
        device: where gradients are.
        dynamic: makes the dynamic ones, of the device and how the scale is to move.
    """

    def __init__(
        self, device: torch.device, dynamic: Callable[[torch.device, LossScale], LossScaler] = GradScaler
    ) -> None:
        self._device, self._dynamic = device, dynamic

    def create(
        self,
        *,
        init: float = 65536.0,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        min: float = 1.0,
        max: float = 2.0**24,
        dynamic: bool = True,
    ) -> LossScaler:
        """Make a scaler. A dynamic one starts at `init`; a static one (`dynamic=False`) keeps `init` for ever.

        Raises:
            ConfigurationError: a scale, factor or interval that could never work.
        """
        if not dynamic:
            if not 0 < init <= torch.finfo(torch.float32).max:
                raise ConfigurationError(f"{init} is no static loss scale", remedy="give a number > 0")
            return StaticScaler(float(init))
        settings = LossScale(init=init, growth=growth, backoff=backoff, interval=interval, min=min, max=max)
        return self._dynamic(self._device, settings)

    def none(self) -> LossScaler:
        """The scaler that leaves everything as it is."""
        return NoScaler()

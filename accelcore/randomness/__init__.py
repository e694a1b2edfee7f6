"""The same random numbers on every device: `runtime.seed(n, same="everywhere")` draws them on the host."""

from __future__ import annotations

from accelcore.randomness.install import draw_on_device, draw_on_host, draws_on_host

__all__ = ["draw_on_device", "draw_on_host", "draws_on_host"]

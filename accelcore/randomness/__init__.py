"""The same random numbers on every device: they are drawn on the host, and moved.

`runtime.seed(n, same="everywhere")` is the door.
"""

from __future__ import annotations

from accelcore.randomness.kernels import draw_alike, draw_apart, drawn_alike

__all__ = ["draw_alike", "draw_apart", "drawn_alike"]

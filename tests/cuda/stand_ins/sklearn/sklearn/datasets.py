"""As many images as the digits have, of ten patterns under noise."""

from __future__ import annotations

import random

__all__ = ["load_digits"]


def load_digits(*, return_X_y: bool) -> tuple[list[list[float]], list[int]]:
    assert return_X_y
    chance = random.Random(0)
    patterns = [[chance.choice((0.0, 16.0)) for _ in range(64)] for _ in range(10)]
    labels = [number % 10 for number in range(1797)]
    images = [[min(16.0, max(0.0, value + chance.gauss(0, 4))) for value in patterns[label]] for label in labels]
    return images, labels

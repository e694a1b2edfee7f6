"""What to type to install one of accelcore's own distributions. A release changes it here."""

from __future__ import annotations

__all__ = ["how_to_install"]


def how_to_install(distribution: str) -> str:
    """What to do to have a distribution of accelcore's repository, such as `accelcore-cpu`."""
    folder = distribution.removeprefix("accelcore-").replace("-", "_")
    return f"install {distribution}: pip install ./plugins/{folder} in a clone of accelcore"

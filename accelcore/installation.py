"""What to type to install one of accelcore's own distributions. A release changes it here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

__all__ = ["how_to_install", "own_plugins"]


def how_to_install(distribution: str) -> str:
    """What to do to have a distribution of accelcore's repository, such as `accelcore-cpu`."""
    folder = distribution.removeprefix("accelcore-").replace("-", "_")
    return f"install {distribution}: pip install ./plugins/{folder} in a clone of accelcore"


def own_plugins() -> dict[str, str]:
    """The plugins of accelcore's repository, installed or not: by the backend's name, the distribution.

    They are the extras of its metadata; none where it has none, as in a folder that is only on the path.
    """
    from packaging.requirements import Requirement

    try:
        own = distribution("accelcore")
    except PackageNotFoundError:
        return {}
    required = {Requirement(text).name for text in own.requires or ()}
    named = {extra: f"accelcore-{extra}" for extra in own.metadata.get_all("Provides-Extra") or ()}
    return {extra: name for extra, name in named.items() if name in required}

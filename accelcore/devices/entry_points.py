"""Entry points, the distributions that declare them, and how to install accelcore's own: by metadata alone."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points

__all__ = ["Declared", "declared", "how_to_install", "own_plugins"]


@dataclass(frozen=True)
class Declared:
    """One entry point and its distribution.

    Attributes:
        point: the entry point.
        distribution: the name of the distribution that declares it; empty if its metadata lacks it.
        version: that distribution's version; empty if its metadata lacks it.
    """

    point: EntryPoint
    distribution: str
    version: str

    @property
    def name(self) -> str:
        """The entry point's name."""
        return self.point.name

    @property
    def label(self) -> str:
        """The distribution with its version, for messages."""
        return f"{self.distribution} {self.version}" if self.distribution else "an unnamed distribution"


def declared(group: str) -> list[Declared]:
    """Return all entry points of a group, in an order that is the same in every process."""
    found = [Declared(point, *_owner(point)) for point in entry_points(group=group)]
    return sorted(found, key=lambda entry: (entry.name, entry.label))


def _owner(point: EntryPoint) -> tuple[str, str]:
    try:
        name, version = (point.dist.name, point.dist.version) if point.dist else ("", "")
    except (ValueError, KeyError):  # its metadata is not text, or empty
        name = version = ""
    return (name, version) if name and version else ("", "")


def how_to_install(distribution: str) -> str:
    """Return the command that installs a distribution of accelcore's repository, such as `accelcore-cpu`."""
    folder = distribution.removeprefix("accelcore-").replace("-", "_")
    return f"install {distribution}: pip install ./plugins/{folder} in a clone of accelcore"


def own_plugins() -> dict[str, str]:
    """Return the distributions of accelcore's own plugins, installed or not, by the backend's name.

    They are the extras in accelcore's metadata. The result is empty if accelcore is only a folder on the path.
    """
    from packaging.requirements import Requirement

    try:
        own = distribution("accelcore")
    except PackageNotFoundError:
        return {}
    required = {Requirement(text).name for text in own.requires or ()}
    named = {extra: f"accelcore-{extra}" for extra in own.metadata.get_all("Provides-Extra") or ()}
    return {extra: name for extra, name in named.items() if name in required}

"""Entry points and the distributions that declare them, by metadata alone: nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

__all__ = ["Declared", "declared"]


@dataclass(frozen=True)
class Declared:
    """One entry point, and who declares it.

    Attributes:
        point: the entry point.
        distribution: the name of the distribution that declares it; empty where its metadata does not say.
        version: that distribution's version; empty where its metadata does not say.
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
        """The distribution with its version, as users are shown it."""
        return f"{self.distribution} {self.version}" if self.distribution else "an unnamed distribution"


def declared(group: str) -> list[Declared]:
    """All entry points of a group, in an order that is the same in every process."""
    found = [Declared(point, *_owner(point)) for point in entry_points(group=group)]
    return sorted(found, key=lambda entry: (entry.name, entry.label))


def _owner(point: EntryPoint) -> tuple[str, str]:
    try:
        name, version = (point.dist.name, point.dist.version) if point.dist else ("", "")
    except (ValueError, KeyError):  # its metadata is no text, or empty
        name = version = ""
    return (name, version) if name and version else ("", "")

"""Which distribution offers which plugin, by metadata alone: nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

__all__ = ["Offer", "offers"]


@dataclass(frozen=True)
class Offer:
    """One entry point of a plugin.

    Attributes:
        name: the plugin's name.
        distribution: the name of the distribution that offers it; empty where its metadata does not say.
        label: that name with the version, as users are shown it.
    """

    name: str
    distribution: str
    label: str
    point: EntryPoint


def offers(group: str) -> list[Offer]:
    """All entry points of a group, in an order that is the same in every process."""
    found = [Offer(point.name, *_owner(point), point) for point in entry_points(group=group)]
    return sorted(found, key=lambda offer: (offer.name, offer.label))


def _owner(point: EntryPoint) -> tuple[str, str]:
    try:
        name, version = (point.dist.name, point.dist.version) if point.dist else ("", "")
    except (ValueError, KeyError):  # its metadata is no text, or empty
        name = version = ""
    return (name, f"{name} {version}") if name and version else ("", "an unnamed distribution")

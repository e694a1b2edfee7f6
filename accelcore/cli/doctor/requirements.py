"""Unmet requirements of installed distributions, by their metadata."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version

from accelcore.util.text import shown

__all__ = ["Misfit", "installed_version", "misfits"]


@dataclass(frozen=True)
class Misfit:
    """A requirement that is not met, or cannot be read.

    Attributes:
        distribution: the distribution that has the requirement.
        requirement: the requirement as in its metadata, without the marker; empty if it cannot be read.
        installed: the installed version; None if nothing is installed.
    """

    distribution: str
    requirement: str
    installed: str | None
    reason: str
    remedy: str


def installed_version(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed, or its metadata has no version."""
    try:
        return version(name)
    except (PackageNotFoundError, ValueError, KeyError):  # ValueError: an empty name, or metadata that is not text
        return None


def misfits(names: Iterable[str]) -> tuple[Misfit, ...]:
    """Return the unmet requirements of the named distributions; one that is not installed has none.

    An empty name stands for a distribution whose metadata has no name.
    """
    found: list[Misfit] = []
    for name in dict.fromkeys(names):
        try:
            found += _of(name, distribution(name))
        except PackageNotFoundError:
            continue
        except (ValueError, KeyError):
            found.append(_unreadable(name, f"the metadata of {name or 'its distribution'} cannot be read"))
    return tuple(found)


def _of(name: str, owner: Distribution) -> Iterator[Misfit]:
    # Imported here, because it is slow to import, and not every command needs it.
    from packaging.requirements import Requirement
    from packaging.version import Version

    if not owner.version:  # an empty file, after an interrupted installation
        raise ValueError(name)
    label = f"{name} {owner.version}"
    for text in owner.requires or ():
        try:
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            requirement.marker = None
            has = installed_version(requirement.name)
            # An installed prerelease counts: somebody chose it.
            if has is not None and requirement.specifier.contains(Version(has), prereleases=True):
                continue
        except (ValueError, KeyError):  # packaging's own errors are these
            yield _unreadable(name, f"{label} requires {shown(text, 200)}, which cannot be read or compared")
            continue
        install = f"pip install {shlex.quote(str(requirement))}"
        if has is None:
            reason, remedy = f"{requirement.name} is not installed", install
        else:
            reason = f"{requirement.name} {has} is installed"
            remedy = f"{install}; or install a version of {name} that fits {requirement.name} {has}"
        yield Misfit(name, str(requirement), has, f"{label} requires {requirement}, and {reason}", remedy)


def _unreadable(name: str, reason: str) -> Misfit:
    remedy = f"pip install --force-reinstall {shlex.quote(name)}" if name else "install it again"
    return Misfit(name, "", None, reason, remedy)

"""Whether installed distributions fit together: what each requires, by its metadata, against what is installed."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version

from accelcore.wording import shown

__all__ = ["Misfit", "installed_version", "misfits"]


@dataclass(frozen=True)
class Misfit:
    """A requirement that is not met, or cannot be read.

    Attributes:
        distribution: who requires it.
        requirement: what it requires, as in its metadata but without the marker; empty where that cannot be read.
        installed: the version that is installed; None where none is.
    """

    distribution: str
    requirement: str
    installed: str | None
    reason: str
    remedy: str


def installed_version(name: str) -> str | None:
    """The version of a distribution; None where it is not installed, or its metadata does not say."""
    try:
        return version(name)
    except (PackageNotFoundError, ValueError, KeyError):  # ValueError: an empty name, or metadata that is no text
        return None


def misfits(names: Iterable[str]) -> tuple[Misfit, ...]:
    """What the distributions of these names require and do not have; a name that is not installed requires nothing.

    An empty name is that of a distribution which does not tell its own.
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
    # Here, because it takes a third as long as all else that doctor imports, and not every command needs it.
    from packaging.requirements import Requirement
    from packaging.version import Version

    if not owner.version:  # an empty file, as an interrupted installation leaves it
        raise ValueError(name)
    label = f"{name} {owner.version}"
    for text in owner.requires or ():
        try:
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            requirement.marker = None
            has = installed_version(requirement.name)
            # With prereleases: what is installed was wanted.
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
    remedy = f"pip install --force-reinstall {shlex.quote(name)}" if name else "install it anew"
    return Misfit(name, "", None, reason, remedy)

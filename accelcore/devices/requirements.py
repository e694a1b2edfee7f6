"""Requirements of installed distributions that the installed versions do not meet."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, version

from accelcore.util.text import shown


def installed_version(name: str) -> str | None:
    """Return the version of a distribution, or None."""
    try:
        return version(name)
    except (PackageNotFoundError, ValueError, KeyError):  # ValueError: an empty name, or metadata that is not text
        return None


def misfits_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the unmet requirements of installed distributions; an empty name is one without a name in its metadata."""
    found: list[str] = []
    for name in dict.fromkeys(names):
        with suppress(PackageNotFoundError):
            try:
                owner = distribution(name)
                texts = (owner.requires or ()) if owner.version else None  # no version: an interrupted installation
            except (ValueError, KeyError):
                texts = None
            if texts is None:
                found.append(f"the metadata of {name or 'its distribution'} cannot be read")
            else:
                found += filter(None, (_misfit(f"{name} {owner.version}", text) for text in texts))
    return tuple(found)


def _misfit(label: str, text: str) -> str | None:
    """Return a sentence on the requirement `text` of a distribution, or None if it is met."""
    # Imported here, because it is slow to import, and not every command needs it.
    from packaging.requirements import Requirement
    from packaging.version import Version

    try:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            return None
        requirement.marker = None
        has = installed_version(requirement.name)
        # An installed prerelease counts: somebody chose it.
        if has is not None and requirement.specifier.contains(Version(has), prereleases=True):
            return None
    except (ValueError, KeyError):  # packaging's own errors are these
        return f"{label} requires {shown(text, 200)}, which cannot be read or compared"
    state = "is not installed" if has is None else f"{has} is installed"
    return f"{label} requires {requirement}, and {requirement.name} {state}"

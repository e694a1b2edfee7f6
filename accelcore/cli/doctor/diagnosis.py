"""Results of `accelcore doctor` as data, with the field names of the JSON."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from typing import Any

from accelcore.cli.doctor.ask_plugins import SelectionPreview, ask_plugins
from accelcore.cli.doctor.deep import Deep, examine
from accelcore.devices import plugins
from accelcore.devices.hookspecs import Probe
from accelcore.devices.plugins import AUTOLOAD, BACKENDS, EXTENSIONS, Candidate, Declared, declared
from accelcore.jobs.launchers import JOB_VARIABLES
from accelcore.known_faults import TORCH_FAULTS, KnownFault
from accelcore.util.text import shown

__all__ = [
    "BROKEN",
    "NOTHING_USABLE",
    "USABLE",
    "Backend",
    "Diagnosis",
    "Extension",
    "InstalledFault",
    "Misfit",
    "diagnose",
]

_SCHEMA = 1
"""Version of the JSON. It changes if a field is removed or changes its meaning, not if one is added."""

USABLE, BROKEN, NOTHING_USABLE = 0, 1, 2

_DISTRIBUTIONS = ("accelcore", "torch", "numpy", "safetensors", "pluggy")

_VARIABLES = (
    "ACCEL_DEVICE",
    "ACCEL_PROBE_TIMEOUT",
    *JOB_VARIABLES,
    AUTOLOAD,
    # Variables that affect threads, compilers and the search for code. None of them holds a secret.
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "CXX",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
)


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


@dataclass(frozen=True)
class Backend:
    """One installed backend.

    Attributes:
        state: `"usable"`, `"unusable"` (it answered, and cannot work here) or `"broken"` (it gave no valid answer).
        versions: the vendor's distributions that the plugin names; None if one is not installed.
        misfits: unmet requirements of the plugin's and the vendor's distributions.
    """

    name: str
    state: str
    distribution: str
    reason: str
    remedy: str
    count: int
    priority: int
    versions: dict[str, str | None]
    misfits: tuple[Misfit, ...]


@dataclass(frozen=True)
class Extension:
    """One installed extension: its state is `"loads"` or `"broken"`."""

    name: str
    state: str
    distribution: str
    reason: str
    remedy: str
    misfits: tuple[Misfit, ...]


@dataclass(frozen=True)
class InstalledFault:
    """A `KnownFault` of an installed version; `backend` is empty if it concerns every backend."""

    backend: str
    kernel: str
    package: str
    installed: str
    versions: str
    what: str
    instead: str
    reference: str


@dataclass(frozen=True)
class Diagnosis:
    """All results.

    Attributes:
        versions: Python, accelcore, torch and other requirements; None if one is not installed.
        platform: the system, the machine, the C library, the number of cores.
        misfits: unmet requirements of accelcore itself.
        environment: the relevant variables; None if one is not set.
        autoload: the entry points that `import torch` calls.
        crash: how all plugins together ended their process, if no plugin does so alone; otherwise empty.
        advice: further notes.
        faults: known kernel bugs of the installed versions, for usable backends.
        deep: the trials of `--deep`, or None.
    """

    versions: dict[str, str | None]
    platform: str
    executable: str
    misfits: tuple[Misfit, ...]
    backends: tuple[Backend, ...]
    extensions: tuple[Extension, ...]
    selection: SelectionPreview
    environment: dict[str, str | None]
    autoload: tuple[Declared, ...]
    crash: str = ""
    advice: tuple[str, ...] = ()
    faults: tuple[InstalledFault, ...] = ()
    deep: Deep | None = None

    @property
    def broken(self) -> list[str]:
        """The names of everything that is broken."""
        names = [f"backend {backend.name}" for backend in self.backends if backend.state == "broken"]
        names += [f"extension {extension.name}" for extension in self.extensions if extension.state == "broken"]
        names += ["all plugins together"] if self.crash else []
        names += ["versions for accelcore"] if self.misfits else []
        names += [f"versions for backend {backend.name}" for backend in self.backends if backend.misfits]
        names += [f"versions for extension {extension.name}" for extension in self.extensions if extension.misfits]
        if self.deep is not None:
            names += ["import torch"] if self.deep.torch.outcome != "works" else []
            trials = (trial for trial in self.deep.backends if trial.outcome not in ("works", "not tried"))
            names += [f"backend {trial.name} (--deep)" for trial in trials]
        return names

    @property
    def usable(self) -> list[str]:
        """The names of the usable backends; with `--deep` of those whose trial works."""
        names = [backend.name for backend in self.backends if backend.state == "usable"]
        if self.deep is not None:
            works = {trial.name for trial in self.deep.backends if trial.outcome == "works"}
            names = [name for name in names if name in works]
        return names

    @property
    def exit_code(self) -> int:
        """The exit code 0, 1 or 2; that no backend is usable matters more than that something is broken."""
        if not self.usable:
            return NOTHING_USABLE
        return BROKEN if self.broken else USABLE

    def as_json(self) -> dict[str, Any]:
        """Return the fields and the verdict."""
        verdict = {"exit_code": self.exit_code, "usable": self.usable, "broken": self.broken}
        return {"schema": _SCHEMA, **verdict, **asdict(self)}


def diagnose(deep_timeout: float | None = None) -> Diagnosis:
    """Ask every plugin and read the metadata; with a timeout in seconds, also run the trials of `--deep`."""
    answers, crash = ask_plugins()
    assert answers.selection is not None, "it was asked for"
    candidates = answers.candidates
    found = plugins.autoloads()
    offered = declared(BACKENDS)
    backends = tuple(_backend(candidate, offered) for candidate in candidates)
    offered = declared(EXTENSIONS)
    return Diagnosis(
        versions={"python": platform.python_version(), **_versions(_DISTRIBUTIONS)},
        platform=_platform(),
        executable=sys.executable,
        misfits=_misfits(["accelcore"]),
        backends=backends,
        extensions=tuple(_extension(extension, offered) for extension in answers.extensions),
        selection=answers.selection,
        environment=_environment(candidate.probe for candidate in candidates),
        autoload=tuple(found),
        crash=crash,
        advice=tuple(_advice(found, candidates)),
        faults=tuple(_installed_faults(candidates)),
        deep=None if deep_timeout is None else examine(candidates, found, deep_timeout),
    )


def _platform() -> str:
    parts = (platform.system(), platform.release(), platform.machine(), " ".join(platform.libc_ver()))
    return f"{' '.join(filter(str.strip, parts))}, {os.cpu_count()} cores"


def _backend(candidate: Candidate, offered: Iterable[Declared]) -> Backend:
    probe = candidate.probe
    state = "broken" if candidate.error is not None else "usable" if probe.available else "unusable"
    owners = [entry.distribution for entry in offered if entry.name == candidate.name]
    return Backend(
        name=candidate.name,
        state=state,
        distribution=candidate.distribution,
        reason=probe.reason,
        remedy="" if probe.available else probe.remedy,
        count=probe.count,
        priority=probe.priority,
        versions=_versions(probe.distributions),
        misfits=_misfits([*owners, *filter(None, probe.distributions)]),
    )


def _extension(extension: plugins.Extension, offered: Iterable[Declared]) -> Extension:
    state, remedy = ("broken", f"repair or uninstall {extension.distribution}") if extension.reason else ("loads", "")
    owners = [
        entry.distribution for entry in offered if (entry.name, entry.label) == (extension.name, extension.distribution)
    ]
    return Extension(extension.name, state, extension.distribution, extension.reason, remedy, _misfits(owners))


def _installed_faults(candidates: Iterable[Candidate]) -> Iterator[InstalledFault]:
    known: list[tuple[str, Sequence[KnownFault]]] = [("", TORCH_FAULTS)]
    known += [(candidate.name, candidate.faults) for candidate in candidates if candidate.probe.available]
    for backend, faults in known:
        for fault in faults:
            if fault.applies:
                yield InstalledFault(backend, *(getattr(fault, field.name) for field in fields(InstalledFault)[1:]))


def _versions(names: Iterable[str]) -> dict[str, str | None]:
    return {name: _installed_version(name) for name in names}


def _environment(probes: Iterable[Probe]) -> dict[str, str | None]:
    names = [*_VARIABLES, *(name for probe in probes for name in probe.environment)]
    return {name: os.environ.get(name) for name in dict.fromkeys(names)}


def _advice(found: Sequence[Declared], candidates: Sequence[Candidate]) -> Iterable[str]:
    if not plugins.autoload_enabled(os.environ):
        return
    for autoload, candidate in plugins.autoloads_of_unusable_backends(found, candidates):
        yield (
            f"import torch loads {autoload}, although {candidate.name} is not usable here ({candidate.probe.reason}); "
            f"if that makes import torch fail, set {AUTOLOAD}=0 or start the script with accelcore run"
        )


def _installed_version(name: str) -> str | None:
    try:
        return version(name)
    except (PackageNotFoundError, ValueError, KeyError):  # ValueError: an empty name, or metadata that is not text
        return None


def _misfits(names: Iterable[str]) -> tuple[Misfit, ...]:
    """Return the unmet requirements of installed distributions; an empty name is one without a name in its metadata."""
    found: list[Misfit] = []
    for name in dict.fromkeys(names):
        try:
            found += _unmet(name, distribution(name))
        except PackageNotFoundError:
            continue
        except (ValueError, KeyError):
            found.append(_unreadable(name, f"the metadata of {name or 'its distribution'} cannot be read"))
    return tuple(found)


def _unmet(name: str, owner: Distribution) -> Iterator[Misfit]:
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
            has = _installed_version(requirement.name)
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

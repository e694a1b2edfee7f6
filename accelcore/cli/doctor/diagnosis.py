"""Results of `accelcore doctor` as data, with the field names of the JSON."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from accelcore.cli.doctor.ask_plugins import Selection, ask_plugins
from accelcore.cli.doctor.deep import Attempt, examine, remembered_torch, try_torch
from accelcore.devices.plugins import (
    AUTOLOAD,
    EXTENSIONS,
    Candidate,
    Declared,
    Extension,
    autoload_enabled,
    autoloads,
    declared,
)
from accelcore.devices.request import unread_variables
from accelcore.devices.requirements import installed_version, misfits_of
from accelcore.jobs.launchers import JOB_VARIABLES
from accelcore.known_faults import TORCH_FAULTS

_SCHEMA = 1  # version of the JSON. It changes if a field is removed or changes its meaning, not if one is added.

USABLE, BROKEN, NOTHING_USABLE = 0, 1, 2

_DISTRIBUTIONS = ("accelcore", "torch", "numpy", "safetensors", "pluggy")

# Also those that affect threads, compilers and the search for code. None of them holds a secret.
_VARIABLES = (
    *("ACCEL_DEVICE", "ACCEL_PROBE_TIMEOUT", *JOB_VARIABLES, AUTOLOAD),
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "CXX", "PYTHONPATH", "LD_LIBRARY_PATH"),
)


@dataclass(frozen=True)
class Plugin:
    """One installed backend or extension."""

    name: str
    # of a backend `"usable"`, `"unusable"` (it answered, and cannot work here) or `"broken"` (it gave no valid answer);
    # of an extension `"loads"` or `"broken"`
    state: str
    distribution: str
    reason: str
    remedy: str
    misfits: tuple[str, ...]  # unmet requirements of the plugin's and the vendor's distributions, a sentence each
    versions: dict[str, str | None]  # the vendor's distributions that a backend names; None if one is not installed
    count: int = 0  # the number of devices; 0 for an extension
    priority: int = 0  # the backend's rank for `auto`; 0 for an extension


@dataclass(frozen=True)
class Diagnosis:
    """All results."""

    versions: dict[str, str | None]  # Python, accelcore, torch and other requirements; None if one is not installed
    platform: str  # the system, the machine, the C library, the number of cores
    executable: str
    misfits: tuple[str, ...]  # unmet requirements of accelcore itself
    backends: tuple[Plugin, ...]
    extensions: tuple[Plugin, ...]
    selection: Selection
    environment: dict[str, str | None]  # the relevant variables; None if one is not set
    # set variables that begin with ACCEL_ and that nothing installed reads; with the most similar one, or None
    unknown_variables: dict[str, str | None]
    autoload: tuple[Declared, ...]  # the entry points that `import torch` calls
    import_torch: Attempt  # the attempt of `import torch`
    # known kernel bugs of the installed versions: the fields of `KnownFault`, the `installed` version, and the
    # `backend`, which is empty for a bug on every backend
    faults: tuple[dict[str, str | None], ...]
    deep: tuple[Attempt, ...] | None  # the backends' attempts of `--deep`, or None

    @property
    def broken(self) -> list[str]:
        """The names of everything that is broken."""
        plugins = [(f"backend {one.name}", one) for one in self.backends]
        plugins += [(f"extension {one.name}", one) for one in self.extensions]
        names = [label for label, one in plugins if one.state == "broken"]
        names += ["versions for accelcore"] if self.misfits else []
        names += [f"versions for {label}" for label, one in plugins if one.misfits]
        names += ["import torch"] if self.torch_fails else []
        if self.deep is not None:
            attempts = (attempt for attempt in self.deep if attempt.outcome not in ("works", "not tried"))
            names += [f"backend {attempt.name} (--deep)" for attempt in attempts]
        if not names and self.selection["error"] is not None:
            names = ["select()"]
        return names

    @property
    def torch_fails(self) -> bool:
        """Whether `import torch` failed."""
        return self.import_torch.outcome != "works"

    @property
    def usable(self) -> list[str]:
        """The names of the usable backends; with `--deep` of those whose attempt works."""
        names = [backend.name for backend in self.backends if backend.state == "usable"]
        if self.deep is not None:
            works = {attempt.name for attempt in self.deep if attempt.outcome == "works"}
            names = [name for name in names if name in works]
        return names

    @property
    def exit_code(self) -> int:
        """The exit code 0, 1 or 2: no usable backend matters more than a broken one, and a broken torch most."""
        if not self.usable and not self.torch_fails:
            return NOTHING_USABLE
        return BROKEN if self.broken else USABLE

    def as_json(self) -> dict[str, Any]:
        """Return the fields and the verdict."""
        verdict = {"exit_code": self.exit_code, "usable": self.usable, "broken": self.broken}
        return {"schema": _SCHEMA, **verdict, **asdict(self)}


def diagnose(timeout: float = 60, *, deep: bool = False) -> Diagnosis:
    """Ask every plugin, read the metadata and try `import torch`; also try each backend if `deep`.

    An attempt may take `timeout` seconds. Without `deep`, an attempt of `import torch` that worked before is not
    repeated, unless `import torch` also loads other packages.
    """
    answers = ask_plugins()
    assert answers.selection is not None, "it was asked for"
    candidates = answers.candidates
    found = autoloads()
    torch, autoload_broken, selection = None, False, answers.selection
    if not deep and not (found and autoload_enabled(os.environ)):
        torch = remembered_torch()
    if torch is None:
        torch, autoload_broken = try_torch(candidates, found, timeout)
    if torch.outcome != "works":  # then `select()` raises
        error = {"type": "BackendUnavailableError", "what": "torch cannot be imported", "available": ""}
        error |= {"why": torch.reason, "remedy": torch.remedy}
        selection = {**selection, "chosen": None, "error": error}
    system = (platform.system(), platform.release(), platform.machine(), " ".join(platform.libc_ver()))
    variables = [*_VARIABLES, *(name for candidate in candidates for name in candidate.probe.environment)]
    return Diagnosis(
        versions={"python": platform.python_version(), **{name: installed_version(name) for name in _DISTRIBUTIONS}},
        platform=f"{' '.join(filter(str.strip, system))}, {os.cpu_count()} cores",
        executable=sys.executable,
        misfits=misfits_of(["accelcore"]),
        backends=tuple(map(_backend, candidates)),
        extensions=tuple(map(_extension, answers.extensions)),
        selection=selection,
        environment={name: os.environ.get(name) for name in variables},
        unknown_variables=unread_variables(variables),
        autoload=tuple(found),
        import_torch=torch,
        faults=tuple(_installed_faults(candidates)),
        deep=examine(candidates, torch, autoload_broken, timeout) if deep else None,
    )


def _backend(candidate: Candidate) -> Plugin:
    probe = candidate.probe
    return Plugin(
        name=candidate.name,
        state="broken" if candidate.error is not None else "usable" if probe.available else "unusable",
        distribution=candidate.distribution,
        reason=probe.reason,
        remedy="" if probe.available else probe.remedy,
        misfits=misfits_of(candidate.distributions),
        versions={name: installed_version(name) for name in probe.distributions},
        count=probe.count,
        priority=probe.priority,
    )


def _extension(extension: Extension) -> Plugin:
    label = extension.distribution
    state, remedy = ("broken", f"repair or uninstall {label}") if extension.reason else ("loads", "")
    owners = [
        entry.distribution for entry in declared(EXTENSIONS) if (entry.name, entry.label) == (extension.name, label)
    ]
    return Plugin(extension.name, state, label, extension.reason, remedy, misfits_of(owners), versions={})


def _installed_faults(candidates: Iterable[Candidate]) -> Iterator[dict[str, str | None]]:
    known = {"": TORCH_FAULTS} | {one.name: one.faults for one in candidates if one.probe.available}
    for backend, faults in known.items():
        for fault in faults:
            if fault.applies:
                yield {"backend": backend, "installed": fault.installed, **asdict(fault)}

"""Find, load and probe plugins: each alone, so that none can break another.

Only this file and `hookspecs.py` use pluggy. Each plugin is loaded and probed in a thread, because its import may raise
anything, exit, or never return. `installed()` shows the error, and selecting that plugin raises it as the cause.

`import torch` also loads plugins: it calls the entry points of `torch.backends`, of which this file reads the metadata.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import EntryPoint, entry_points, metadata
from itertools import chain
from types import TracebackType
from typing import Any

import pluggy

from accelcore.devices import Probe, hookspecs
from accelcore.devices.request import probe_timeout
from accelcore.devices.requirements import misfits_of
from accelcore.errors import PluginError, logger
from accelcore.known_faults import KnownFault
from accelcore.util.text import first_line, shown

BACKENDS = "accelcore.backends"
EXTENSIONS = "accelcore.extensions"
EMULATORS = "accelcore.emulators"

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Environment variable that turns off torch's autoload, if it is set to anything but 1."""

_LONGEST = 300  # characters of a plugin's own message that are shown
_SETTLED = 60  # seconds after which a folder that has not changed holds whole distributions


@dataclass(frozen=True)
class Declared:
    """One entry point, and the distribution that declares it with its version; empty if its metadata lacks them."""

    name: str
    value: str
    distribution: str
    version: str

    @property
    def point(self) -> EntryPoint:
        return EntryPoint(self.name, self.value, group="")  # without the metadata, equal for equal declarations

    @property
    def package(self) -> str:
        """The top-level package that it loads."""
        return re.split(r"[.:]", self.value, maxsplit=1)[0]

    @property
    def label(self) -> str:
        return f"{self.distribution} {self.version}" if self.distribution else "an unnamed distribution"

    def __str__(self) -> str:
        return f"{self.name} = {self.value} ({self.label})"


@dataclass(frozen=True)
class Candidate:
    """One installed backend, with its probe or its error."""

    name: str  # the entry point's name, by which users select it
    distribution: str  # the distributions that offer it, with versions
    probe: Probe  # the plugin's answer, or one with the reason why there is no answer
    error: BaseException | None = None  # the error of a broken plugin, which has no hooks
    hooks: Any = None
    faults: tuple[KnownFault, ...] = ()

    @property
    def distributions(self) -> list[str]:
        """The names of the plugin's and the vendor's distributions; empty for one without a name in its metadata."""
        owners = [entry.distribution for entry in declared(BACKENDS) if entry.name == self.name]
        return [*owners, *filter(None, self.probe.distributions)]


@dataclass(frozen=True)
class Extension:
    """One installed extension, with its hooks or its error."""

    name: str
    distribution: str  # the distribution that offers it, with its version
    reason: str = ""  # the error in one line; empty if it loads
    hooks: Any = None


class _Call:
    """Call of a plugin's function in a daemon thread, because it may never return."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function, self._done = function, threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        threading.Thread(target=self._run, name="accelcore-probe", daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001  # SystemExit too: a plugin must not end the program
            self._error, self._traceback = error, error.__traceback__
        self._done.set()

    def outcome(self, deadline: float) -> tuple[Any, BaseException | None]:
        """Return the function's value and its error, which is a TimeoutError if it has not returned by the deadline."""
        if not self._done.wait(max(0.0, deadline - time.monotonic())):
            return None, TimeoutError(f"it did not answer within {probe_timeout():g} seconds (ACCEL_PROBE_TIMEOUT)")
        # The traceback has no frames of earlier raises.
        return self._value, self._error and self._error.with_traceback(self._traceback)


def declared(group: str) -> list[Declared]:
    """Return all entry points of a group, in an order that is the same in every process."""
    folders = tuple((path, _changed(path)) for path in sys.path)
    # A distribution that is just being installed or removed may be incomplete: its own folder may still change.
    settled = time.time() - max((changed for _, changed in folders), default=0.0) > _SETTLED
    return list((_read if settled else _read.__wrapped__)(group, folders))


@lru_cache(maxsize=16)
def _read(group: str, folders: tuple[tuple[str, float], ...]) -> tuple[Declared, ...]:
    """Read the metadata of all distributions, which takes milliseconds, again if a folder of `sys.path` has changed."""
    found = [Declared(point.name, point.value, *_owner(point)) for point in entry_points(group=group)]
    return tuple(sorted(found, key=lambda entry: (entry.name, entry.label)))


def _changed(path: str) -> float:
    """Return when a distribution was last installed into a folder or removed from it; 0 if it is no folder."""
    try:
        return os.stat(path or ".").st_mtime
    except OSError:
        return 0.0


def only_one(offers: Sequence[Declared], what: str) -> Declared:
    """Return the one entry point that offers `what`, such as `"the backend 'cpu'"`; raise PluginError for several."""
    if len(offers) > 1:
        labels = " and ".join(entry.label for entry in offers)
        raise PluginError(f"two distributions offer {what}: {labels}", remedy="uninstall one of them")
    return offers[0]


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


def how_to_fit() -> str:
    """Return what to do about versions that do not fit together, with a command for the installed plugins."""
    own, names = own_plugins(), {entry.name for entry in declared(BACKENDS)}
    folders = "".join(f" ./plugins/{name}" for name in sorted(own.keys() & names))
    return f"install versions that fit together; accelcore and its plugins from one clone: pip install .{folders}"


def broken(candidate: Candidate, what: str, error: BaseException, remedy: str) -> PluginError:
    """Return the error for a plugin that raised `error`. Versions that do not fit are a likely cause."""
    misfits = misfits_of(candidate.distributions)
    return PluginError(
        what,
        why="; ".join([describe_error(error), *misfits]),
        available=other_backends([candidate.name]),
        remedy=how_to_fit() if misfits else remedy,
    )


def own_plugins() -> dict[str, str]:
    """Return the distributions of accelcore's own plugins, installed or not, by the backend's name.

    The result is empty if accelcore is only a folder on the path.
    """
    return {entry.name: entry.package.replace("_", "-") for entry in declared("accelcore.own_backends")}


def other_backends(names: Iterable[str] = ()) -> str:
    """Return the names of the installed backends but `names`, for a message. This loads no plugin."""
    others = sorted({entry.name for entry in declared(BACKENDS)} - {*names})
    return f"{', '.join(others)} (installed; accelcore doctor shows which work here)" if others else "no other backend"


def with_keyword(word: str) -> str | None:
    """Return the backend that has this keyword, such as its vendor: an installed one, or accelcore's own.

    Of an installed one, the keywords are those of its distribution's metadata.
    """
    for entry in declared(BACKENDS):
        keywords = metadata(entry.distribution).get_all("Keywords", []) if entry.distribution else []
        if word in re.split(r"[,\s]+", ",".join(keywords)):
            return entry.name
    return next((entry.value for entry in declared("accelcore.own_words") if entry.name == word), None)


def autoloads() -> list[Declared]:
    """Return every entry point that `import torch` would call."""
    return declared("torch.backends")


def autoload_enabled(environ: Mapping[str, str]) -> bool:
    """Return whether `import torch` calls its entry points."""
    return environ.get(AUTOLOAD, "1") == "1"


@contextmanager
def without_autoload() -> Iterator[None]:
    """Let `import torch` call no entry points in this context."""
    before = os.environ.get(AUTOLOAD)
    os.environ[AUTOLOAD] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[AUTOLOAD]
        else:
            os.environ[AUTOLOAD] = before


def autoloads_of_unusable_backends(
    found: Sequence[Declared], candidates: Iterable[Candidate]
) -> list[tuple[Declared, Candidate]]:
    """Return torch's entry points that load the runtime of an unusable backend, with that backend."""
    return [
        (autoload, candidate)
        for candidate in candidates
        if not candidate.probe.available
        for autoload in found
        if _normal(autoload.distribution) in map(_normal, candidate.probe.distributions)
    ]


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


# A load that never returns holds its thread; later requests wait for the same load.
_loads: dict[EntryPoint, _Call] = {}
_loads_lock = threading.Lock()


def probe_all() -> dict[str, Candidate]:
    """Probe every installed backend plugin, all at the same time; sorted by name."""
    return _probe(declared(BACKENDS))


def find(name: str) -> Candidate | None:
    """Probe the plugin of a backend without loading another; return None if no plugin has that name."""
    return _probe([entry for entry in declared(BACKENDS) if entry.name == name]).get(name)


def extensions() -> list[Extension]:
    """Return every extension that loads; log a warning for one that does not."""
    loaded = load_extensions()
    for extension in loaded:
        if extension.reason:
            logger.warning(
                "extension %s of %s is not used: %s", extension.name, extension.distribution, extension.reason
            )
    return [extension for extension in loaded if not extension.reason]


def load_extensions(entries: Sequence[Declared] | None = None) -> list[Extension]:
    """Load extensions, by default every installed one; the `reason` of one that fails says why."""
    entries = declared(EXTENSIONS) if entries is None else entries
    loads = [_load(entry.point) for entry in entries]  # all at the same time: one that hangs does not delay the others
    deadline = time.monotonic() + probe_timeout()
    loaded = []
    for entry, load in zip(entries, loads, strict=True):
        hooks, error = load.outcome(deadline)
        loaded.append(Extension(entry.name, entry.label, describe_error(error) if error else "", hooks))
    return loaded


def _probe(entries: list[Declared]) -> dict[str, Candidate]:
    deadline = time.monotonic() + probe_timeout()
    by_name: dict[str, list[Declared]] = {}
    for entry in entries:
        by_name.setdefault(entry.name, []).append(entry)
    calls = {name: _Call(partial(_ask, offers, deadline)) for name, offers in by_name.items()}
    candidates = {}
    for name, offers in by_name.items():
        distribution = " and ".join(entry.label for entry in offers)
        answer, error = calls[name].outcome(deadline)
        if error is None:
            hooks, probe, faults = answer
            if probe.absent and any(entry.name == name for entry in declared(EMULATORS)):
                remedy = f"{probe.remedy}; to try it on an emulation: accelcore run --emulate {name} train.py"
                probe = replace(probe, remedy=remedy)
            candidates[name] = Candidate(name, distribution, probe, hooks=hooks, faults=faults)
        else:
            remedy = getattr(error, "remedy", "") or f"repair or uninstall {distribution}"
            broken = Probe(name, available=False, reason=describe_error(error), remedy=remedy)
            candidates[name] = Candidate(name, distribution, broken, error=error)
    return candidates


def _ask(offers: Sequence[Declared], deadline: float) -> tuple[Any, Probe, tuple[KnownFault, ...]]:
    """Return hooks, probe and known faults of the plugin that offers a backend."""
    entry = only_one(offers, f"the backend {offers[0].name!r}")
    point = entry.point
    hooks, error = _load(point).outcome(deadline)
    if error is not None:
        raise error
    answers = hooks.accelcore_probe()
    if len(answers) != 1 or not isinstance(answers[0], Probe):
        raise PluginError(f"{point.value} does not answer accelcore_probe with a Probe (its answers: {answers!r})")
    probe = answers[0]
    if probe.name != point.name:
        raise PluginError(f"{point.value} is installed as {point.name!r} but calls itself {probe.name!r}")
    oldest, written_for = max(1, hookspecs.API - 1), 1 if probe.api is None else probe.api
    if not oldest <= written_for <= hookspecs.API:
        works = f"interface {oldest}" if oldest == hookspecs.API else f"interfaces {oldest} and {hookspecs.API}"
        newer = "accelcore" if written_for > hookspecs.API else entry.label
        raise PluginError(
            f"{point.value} is written for plugin interface {written_for}, and this accelcore works with {works}",
            remedy=f"install a newer {newer}",
        )
    faults = tuple(chain.from_iterable(hooks.accelcore_known_faults()))
    for fault in faults:
        if not isinstance(fault, KnownFault):
            raise PluginError(f"{point.value} answers accelcore_known_faults with {fault!r}, not a KnownFault")
    return hooks, probe, faults


def _load(point: EntryPoint) -> _Call:
    with _loads_lock:
        if point not in _loads:
            _loads[point] = _Call(partial(hooks_of, point))
        return _loads[point]


def hooks_of(point: EntryPoint) -> Any:
    """Load a plugin, and return its hooks."""
    if point.pattern.match(point.value) is None:
        raise PluginError(f"its entry point {shown(point.value)} is malformed: it must be MODULE or MODULE:OBJECT")
    manager = pluggy.PluginManager("accelcore")  # one each: a plugin's hooks are called alone
    manager.add_hookspecs(hookspecs)
    manager.register(point.load(), name=point.name)
    manager.check_pending()  # raises for a misspelled hook, which would never be called
    return manager.hook


def describe_error(error: BaseException | None) -> str:
    """Return the first line of an error, shortened; safe for an error whose `__str__` raises."""
    try:
        text = first_line(error)[:_LONGEST]
    except Exception:  # noqa: BLE001  # its __str__ may raise
        text = ""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({text})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

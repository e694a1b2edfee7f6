"""Choosing a device: the grammar of `select()` and `ACCEL_DEVICE`, and what each kind of request may fall back to.

    request = "auto" | choice {"," choice}
    choice  = name [":" index]            name: a-z, then a-z 0-9 _;  index: no sign, no leading zero

ASCII only; letter case and blanks around the whole are ignored; nothing else is. One choice is an order: it is
carried out or it raises. A list or `auto` may fall back, and says once what it passed over and why.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from accelcore import plugins
from accelcore.environment import Launch, read_launch, shown
from accelcore.errors import (
    AccelError,
    BackendUnavailableError,
    ConfigurationError,
    PluginError,
    UnknownBackendError,
)
from accelcore.plugins import Candidate
from accelcore.probe import Probe

if TYPE_CHECKING:
    from accelcore.backend import Backend

__all__ = ["Choice", "decide", "installed", "parse", "select"]

T = TypeVar("T")

logger = logging.getLogger("accelcore")

_CHOICE = re.compile(r"([a-z][a-z0-9_]{0,31})(?::(0|[1-9][0-9]{0,3}))?")
_LONGEST = 256
_GRAMMAR = "NAME, NAME:INDEX, a list of these in order of preference (npu,cuda,cpu), or auto"
_said: set[str] = set()


@dataclasses.dataclass(frozen=True)
class Choice:
    """One wish: a backend's name, and the device's index where the user gave one."""

    name: str
    index: int | None = None

    def __str__(self) -> str:
        return self.name if self.index is None else f"{self.name}:{self.index}"


def installed() -> dict[str, Probe]:
    """Every installed backend by name, with what it says of itself; a broken plugin's probe says how it broke.

    Imports no torch and initialises no device.
    """
    return {name: candidate.probe for name, candidate in plugins.probe_all().items()}


def select(device: str | None = None) -> Backend:
    """Choose a device and create its backend.

    Args:
        device: `"cpu"`, `"cuda:1"`, a preference list such as `"npu,cuda,cpu"`, or `"auto"`. None takes the
            environment variable ACCEL_DEVICE, and where that is not set, `"auto"`: the best device that works here.
            Without an index, a rank that a launcher started takes the device of its LOCAL_RANK.

    Returns:
        A `Backend`, whose `passed_over` holds the probes of what a list or `auto` could not use. Each call makes a
        new one; several may live in one process.

    Raises:
        ConfigurationError: `device`, ACCEL_DEVICE or a launcher's variable makes no sense.
        UnknownBackendError: no installed plugin has that name.
        BackendUnavailableError: the device asked for cannot be had, or nothing in the list can.
        PluginError: the plugin asked for is broken; its own error is the cause.
    """
    source, text = "device", device
    if text is None:
        source, text = "ACCEL_DEVICE", os.environ.get("ACCEL_DEVICE", "auto")
    backend, passed_over = decide(text, source, _create)
    if passed_over:
        _say_once(text, source, backend, passed_over)
    return dataclasses.replace(backend, passed_over=passed_over)


def decide(text: str, source: str, make: Callable[[Choice, Candidate, int, str], T]) -> tuple[T, tuple[Probe, ...]]:
    """Follow a request to the first device that can be had, and `make` something of it.

    Args:
        text: the request.
        source: where it comes from, for messages.
        make: given the choice, its plugin, the device's index and the request; may raise an AccelError.

    Returns:
        What `make` returned, and what a list or `auto` passed over before it.
    """
    choices = parse(text, source)
    launch = read_launch()
    wishes: Iterable[tuple[Choice, Candidate | None]]
    if choices is None:
        ranking = sorted(plugins.probe_all().values(), key=lambda entry: (-entry.probe.priority, entry.name))
        wishes = ((Choice(candidate.name), candidate) for candidate in ranking)
        return _first_that_works(wishes, launch, "auto", make)
    request = f"{source}={shown(text)}"
    if len(choices) == 1:
        candidate, index = _admit(choices[0], plugins.find(choices[0].name), launch, request, _usable)
        return make(choices[0], candidate, index, request), ()
    # One after the other, so that no plugin is loaded behind the first that works.
    wishes = ((choice, plugins.find(choice.name)) for choice in choices)
    return _first_that_works(wishes, launch, request, make)


def parse(text: str, source: str = "device") -> tuple[Choice, ...] | None:
    """Read a request; None is `auto`. Raises ConfigurationError naming `source` for anything outside the grammar."""
    if not isinstance(text, str):
        raise ConfigurationError(
            f"{source} is a {type(text).__name__}, not a string", available=_GRAMMAR, remedy="give a string"
        )
    request = text.strip(" \t").lower() if text.isascii() else text
    fault = _fault(request)
    if fault:
        raise ConfigurationError(
            f"{source}={shown(text)} is not a device",
            why=fault,
            available=_GRAMMAR,
            remedy=f"correct {source}" + (", or unset it" if source == "ACCEL_DEVICE" else ""),
        )
    if request == "auto":
        return None
    matches = [_CHOICE.fullmatch(part) for part in request.split(",")]
    return tuple(Choice(match[1], None if match[2] is None else int(match[2])) for match in matches if match)


def _fault(request: str) -> str:
    if len(request) > _LONGEST:
        return f"it has more than {_LONGEST} characters"
    parts = request.split(",")
    for part in parts:
        if not _CHOICE.fullmatch(part):
            return f"{shown(part)} is neither NAME nor NAME:INDEX"
        if part.split(":")[0] == "auto" and request != "auto":
            return "auto stands alone: it takes no index, and no list holds it"
    return "it says the same twice" if len(set(parts)) < len(parts) else ""


def _first_that_works(
    wishes: Iterable[tuple[Choice, Candidate | None]],
    launch: Launch | None,
    request: str,
    make: Callable[[Choice, Candidate, int, str], T],
) -> tuple[T, tuple[Probe, ...]]:
    passed_over: list[Probe] = []
    for choice, found in wishes:
        if found is not None and found.probe.available and choice.index is None:
            # Not passed over: ranks that fell back alone could not form one job with the others.
            _index(choice, found.probe, launch, request)
        try:
            candidate, index = _admit(choice, found, launch, str(choice), lambda: "")
            return make(choice, candidate, index, str(choice)), tuple(passed_over)
        except AccelError as error:
            passed_over.append(
                Probe(
                    str(choice),
                    available=False,
                    reason=error.why or error.what,
                    remedy=error.remedy or f"ask for {choice} alone to see the whole error",
                )
            )
    if not passed_over:
        raise BackendUnavailableError(
            "no backend is installed",
            why="accelcore finds its backends as plugins, and there is none in this environment",
            remedy="install accelcore-cpu, and the package of each other device you have (the README lists them)",
        )
    raise BackendUnavailableError(
        f"{request}: nothing of it can be used here",
        why="; ".join(f"{probe.name}: {probe.reason}" for probe in passed_over),
        available=_usable(),
        remedy="; ".join(f"{probe.name}: {probe.remedy}" for probe in passed_over),
    )


def _admit(
    choice: Choice,
    candidate: Candidate | None,
    launch: Launch | None,
    request: str,
    usable: Callable[[], str],
) -> tuple[Candidate, int]:
    """The plugin and the device's index, where by its own word the device can be had."""
    if candidate is None:
        raise UnknownBackendError(
            f"{request}: there is no backend {choice.name!r}",
            why="no installed plugin offers that name",
            available=usable(),
            remedy="install the package that brings it (the README lists accelcore's own), or choose another",
        )
    probe = candidate.probe
    if candidate.error is not None:
        raise PluginError(
            f"{request}: the plugin for {choice.name!r} ({candidate.distribution}) is broken",
            why=probe.reason,
            remedy=probe.remedy,
        ) from candidate.error
    if not probe.available:
        raise BackendUnavailableError(
            f"{request} cannot be used here", why=probe.reason, available=usable(), remedy=probe.remedy
        )
    return candidate, _index(choice, probe, launch, request)


def _create(choice: Choice, candidate: Candidate, index: int, request: str) -> Backend:
    try:
        backend: Backend | None = candidate.hooks.accelcore_create_backend(name=choice.name, index=index)
    except AccelError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginError(
            f"{request}: {candidate.distribution} could not create its backend",
            why=plugins.describe(error),
            remedy="see the cause above",
        ) from error
    return _checked(backend, choice, index, candidate)


def _index(choice: Choice, probe: Probe, launch: Launch | None, request: str) -> int:
    local_rank = launch.local_rank if launch is not None and probe.exclusive else 0
    index = local_rank if choice.index is None else choice.index
    if index < probe.count:
        return index
    cause = f"LOCAL_RANK={local_rank} on this host" if choice.index is None else request
    raise BackendUnavailableError(
        f"{cause}: there is no device {choice.name}:{index}",
        why=f"this process sees {probe.count} of them, counted from 0",
        available=f"{choice.name}:0" + (f" to {choice.name}:{probe.count - 1}" if probe.count > 1 else ""),
        remedy="choose one of those" if choice.index is not None else "start as many ranks a host as it has devices",
    )


def _checked(backend: object, choice: Choice, index: int, candidate: Candidate) -> Backend:
    from accelcore.backend import Backend  # needs torch, which a request that fails above must not wait for

    if not isinstance(backend, Backend) or (backend.name, backend.index) != (choice.name, index):
        raise PluginError(
            f"{candidate.distribution} was asked for {choice.name}:{index} and returned "
            + (f"{backend.name}:{backend.index}" if isinstance(backend, Backend) else type(backend).__name__),
            remedy=f"report this to the authors of {candidate.distribution}",
        )
    for hooks in (candidate.hooks, *plugins.extensions()):
        register = partial(hooks.accelcore_register_optimizers, backend=backend, registry=backend.optimizers)
        error = plugins.within_time(register)
        if error is not None and hooks is candidate.hooks:
            raise PluginError(f"{candidate.distribution} could not register its optimizers") from error
        if error is not None:
            reason = plugins.describe(error)
            logger.warning("an extension could not register its optimizers for %s: %s", choice, reason)
    return backend


def _usable() -> str:
    names = [name for name, probe in installed().items() if probe.available]
    return ", ".join(names) or "no usable backend is installed"


def _say_once(text: str, source: str, backend: Backend, passed_over: tuple[Probe, ...]) -> None:
    launch = read_launch()
    if launch is not None and launch.rank != 0:
        return
    request = "auto" if parse(text, source) is None else f"{source}={shown(text)}"
    reasons = "; ".join(f"{probe.name}: {probe.reason}" for probe in passed_over)
    message = f"{request} chose {backend.name}:{backend.index} and passed over {reasons}"
    if message not in _said:
        _said.add(message)
        logger.warning("%s", message)

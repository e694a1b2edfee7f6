"""Choose a device: `select()`, `installed()`, and the fallback of a list or `auto`.

A request for one device works or raises. A list or `auto` may fall back, and logs once what does not work and why.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar, cast

from accelcore.devices import Probe, plugins
from accelcore.devices.create import Found, create_backend
from accelcore.devices.plugins import Candidate, declared, how_to_install, other_backends, own_plugins, with_keyword
from accelcore.devices.request import Choice, parse, requested_device
from accelcore.errors import (
    AccelError,
    BackendUnavailableError,
    ConfigurationError,
    UnknownBackendError,
    logger,
    nearest,
)
from accelcore.jobs.launchers import Launch, read_launch
from accelcore.util.text import is_whole, shown

if TYPE_CHECKING:
    import torch

    from accelcore.backend import Backend

T = TypeVar("T")

_TEN_LINES = """\
from accelcore import Probe, hookimpl


@hookimpl
def accelcore_probe():
    return Probe("{name}", available=True, priority=50, count=1, api=1)


@hookimpl
def accelcore_create_backend(name, index):
    from accelcore.roles import from_torch  # only now is torch imported

    return from_torch("{name}", index) if name == "{name}" else None
"""


def installed() -> dict[str, Probe]:
    """Return the probe of every installed backend by name; a broken plugin's probe has its error.

    This imports no torch and initialises no device.

    Example:
        >>> accelcore.installed()["cpu"].available
        True
    """
    return {name: candidate.probe for name, candidate in plugins.probe_all().items()}


def select(device: str | torch.device | None = None, *, local_rank: int | None = None) -> Backend:
    """Choose a device and create its backend.

    Example:
        >>> accel = accelcore.select("cpu")
        >>> model = model.to(accel.device)

    Args:
        device: `"cpu"`, `"cuda:1"`, a preference list such as `"npu,cuda,cpu"`, or `"auto"`. None or "" means the
            environment variable ACCEL_DEVICE or, if that is unset or empty, `"auto"`: the best device that works here.
            A `torch.device` works, too.
            Without an index, a launcher's rank takes the device with its local rank, or its only device if `srun`
            shows it just one.
        local_rank: this rank's number on its host, in a script that starts its own ranks; None means the launcher's.

    Returns:
        A new `Backend`. Its `passed_over` holds the probes that a list or `auto` could not use. Several backends may
        live in one process. Creating one may set state of the vendor's runtime, such as the current device: see the
        plugin's documentation.

    Raises:
        ConfigurationError: `device`, ACCEL_DEVICE or a launcher's variable is invalid, or LOCAL_RANK is needed and not
            set.
        UnknownBackendError: no installed plugin has that name.
        BackendUnavailableError: the device, or every device of a list, is not available, or torch cannot be imported.
        PluginError: the selected plugin is broken; its own error is the cause.
    """
    if local_rank is not None and not is_whole(local_rank):
        raise ConfigurationError(
            f"local_rank={local_rank!r} is not a rank", remedy="give this rank's number on its host, counted from 0"
        )
    torch_loaded = sys.modules.get("torch")
    if not isinstance(device, str | None) and torch_loaded and isinstance(device, torch_loaded.device):
        device = str(device)
    source, text = "device", cast("str | None", device)  # `parse` refuses anything else
    if text is None or text == "":
        source, text = "ACCEL_DEVICE", requested_device() or "auto"

    backend, passed_over = decide(text, source, create_backend, local_rank=local_rank)
    _say_once(text, source, backend, passed_over)
    return dataclasses.replace(backend, passed_over=passed_over)


def check_installed(text: str, source: str) -> None:
    """Raise if a request is invalid, or names one backend that no installed plugin offers; load no plugin."""
    choices, names = parse(text, source), {entry.name for entry in declared(plugins.BACKENDS)}
    if choices is not None and len(choices) == 1 and choices[0].name not in names:
        raise _unknown(choices[0], f"{source}={shown(text)}")


def decide(
    text: str, source: str, make: Callable[[Found], T], *, local_rank: int | None = None
) -> tuple[T, tuple[Probe, ...]]:
    """Return the result of `make` for the first device of a request that works, and the probes of those before it.

    If `make` raises an AccelError, a list or `auto` continues with the next device. A `local_rank` of None is that of
    the launcher.
    """
    choices = parse(text, source)
    # Of a Launch, only the local rank matters here.
    place = read_launch() if local_rank is None else Launch(local_rank, local_rank + 1, local_rank, "env://")
    wishes: Iterable[tuple[Choice, Candidate | None]]
    if choices is None:
        request = "auto"
        # Broken plugins first: nobody knows their priority, and they have to be among the devices that do not work.
        ranking = sorted(plugins.probe_all().values(), key=lambda it: (it.error is None, -it.probe.priority, it.name))
        wishes = ((Choice(candidate.name), candidate) for candidate in ranking)
    else:
        request = f"{source}={shown(text)}"
        if len(choices) == 1:
            return make(_admit(choices[0], plugins.find(choices[0].name), place, request)), ()
        # One after the other, so that no plugin after the first that works is loaded.
        wishes = ((choice, plugins.find(choice.name)) for choice in choices)
    passed_over: list[Probe] = []
    for choice, candidate in wishes:
        if candidate is not None and candidate.probe.available and choice.index is None:
            # Raise instead of falling back: a rank that falls back alone cannot join the others.
            _index(choice, candidate.probe, place, request)
        try:
            return make(_admit(choice, candidate, place, str(choice))), tuple(passed_over)
        except AccelError as error:
            remedy = error.remedy or f"select {choice} alone to see the whole error"
            absent, reason = candidate is not None and candidate.probe.absent, error.why or error.what
            passed_over.append(Probe(str(choice), available=False, reason=reason, remedy=remedy, absent=absent))
    if not passed_over:
        raise BackendUnavailableError(
            "no backend is installed",
            why="backends are plugins, and this environment has no plugin",
            remedy=how_to_install("accelcore-cpu") + "; and the package of every other device that you have",
        )
    raise BackendUnavailableError(
        f"{request}: none of the choices can be used here",
        why="; ".join(f"{probe.name}: {probe.reason}" for probe in passed_over),
        available=other_backends(probe.name for probe in passed_over),
        remedy="; ".join(f"{probe.name}: {probe.remedy}" for probe in passed_over),
    )


def _admit(choice: Choice, candidate: Candidate | None, place: Launch | None, request: str) -> Found:
    """Return the device if its plugin reports it as available; raise otherwise."""
    if candidate is None:
        raise _unknown(choice, request)
    probe = candidate.probe
    if candidate.error is None and probe.available:
        return Found(candidate, _index(choice, probe, place, request), request)
    if candidate.error is not None:
        what = f"{request}: the plugin for {choice.name!r} ({candidate.distribution}) is broken"
        raise plugins.broken(candidate, what, candidate.error, probe.remedy) from candidate.error
    what = f"{request} cannot be used here"
    others = other_backends([choice.name])
    raise BackendUnavailableError(what, why=probe.reason, available=others, remedy=probe.remedy)


def _index(choice: Choice, probe: Probe, place: Launch | None, request: str) -> int:
    rank = place if choice.index is None and probe.exclusive else None
    index = choice.index or 0
    if rank is not None and rank.own_devices and probe.count == 1:
        _log_once(logging.INFO, f"this rank takes {choice.name}:0, the one device that its launcher shows it")
    elif rank is not None:
        if rank.local_rank is None:
            raise ConfigurationError(
                f"{request}: LOCAL_RANK is not set, and each rank needs a {choice.name} device of its own",
                why="the job may span hosts, so RANK does not tell which of this host's devices belongs to this rank",
                remedy="set LOCAL_RANK to this rank's number on its host, counted from 0; or LOCAL_WORLD_SIZE if the "
                f"whole job is on one host; or name the device: {choice.name}:0",
            )
        index = rank.local_rank
    if index < probe.count:
        return index
    raise BackendUnavailableError(
        f"{f'rank {index} of this host' if rank else request}: there is no device {choice.name}:{index}",
        why=f"this process sees {probe.count} {choice.name} device{'s' * (probe.count > 1)}, numbered from 0"
        + _limited_by(probe),
        available=f"{choice.name}:0" + (f" to {choice.name}:{probe.count - 1}" if probe.count > 1 else ""),
        remedy="start as many ranks on a host as it has devices; if the launcher shows each rank one device, set "
        f"ACCEL_DEVICE={choice.name}:0"
        if rank
        else ("choose one of these" if probe.count > 1 else f"choose {choice.name}:0")
        + (" by ACCEL_DEVICE or --device" if request.startswith("ACCEL_DEVICE=") else ""),
    )


def _limited_by(probe: Probe) -> str:
    """Return the variable that limits the devices, for a message; empty if it is not set."""
    value = os.environ.get(probe.visible_devices) if probe.visible_devices else None
    return "" if value is None else f" ({probe.visible_devices}={shown(value)})"


def rank_count(text: str, source: str, wanted: int | None = None) -> int:
    """Return how many ranks a job on this host has: `wanted`, or as many as a request's device has room for.

    Raise if the request names one device, and this does not work.
    """
    choices = parse(text, source)
    if wanted is not None and (choices is None or len(choices) > 1):
        return wanted  # each rank may use another device than the first that works
    probe, _ = decide(text, source, lambda found: found.candidate.probe, local_rank=0)
    if wanted is None:
        return probe.ranks
    if choices and choices[0].index is None and probe.exclusive and probe.count < wanted:
        schedulers = {"SLURM": probe.slurm, "Kubernetes": probe.kubernetes, "Ray": probe.ray}
        granted = ", ".join(f"{name} under {scheduler}" for scheduler, name in schedulers.items() if name)
        raise BackendUnavailableError(
            f"{wanted} ranks need {wanted} {probe.name} devices, one each",
            why=f"this process sees {probe.count}{_limited_by(probe)}",
            remedy=f"start --nproc {probe.count}, or --nproc auto for as many as there are"
            + (f"; or ask for {wanted}: {granted}" if granted else ""),
        )
    return wanted


def ten_lines(name: str) -> str:
    """Return the module that makes torch's device `name` a backend, by the entry-point group `accelcore.backends`."""
    return _TEN_LINES.format(name=name)


def unserved_device() -> str | None:
    """Return torch's accelerator if it works here and no installed plugin has its name; None without a loaded torch."""
    accelerator = getattr(sys.modules.get("torch"), "accelerator", None)  # absent while torch is being imported
    current = None if accelerator is None else accelerator.current_accelerator()
    if accelerator is None or current is None or current.type in {entry.name for entry in declared(plugins.BACKENDS)}:
        return None
    return str(current.type) if accelerator.is_available() else None  # asked last: it may start a driver


def imitations() -> Iterator[str]:
    """Yield a sentence for each of torch's own device modules that another package answers for."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for name, module in sorted(vars(torch).items()):
        count = vars(module).get("device_count") if isinstance(module, ModuleType) else None
        # A wrapper may have taken the name of what it wraps.
        source = getattr(count, "__globals__", {}).get("__name__") or getattr(count, "__module__", "torch")
        package = str(source).partition(".")[0]
        if count is not None and package != "torch" and PathFinder.find_spec(f"torch.{name}", torch.__path__):
            owners = ", ".join(packages_distributions().get(package, [package]))
            yield f"torch.{name} is answered by {package} ({owners}), not by torch"


def _unknown(choice: Choice, request: str) -> UnknownBackendError:
    what, why = f"{request}: there is no backend {choice.name!r}", "no installed plugin offers that name"
    return UnknownBackendError(what, why=why, available=other_backends(), remedy=_how_to_have(choice.name))


def _how_to_have(name: str) -> str:
    own, offered = own_plugins(), {entry.name for entry in declared(plugins.BACKENDS)}
    if name in own:
        return f"{how_to_install(own[name])}; or choose another"
    if name == unserved_device():
        writes = f"`accelcore new-backend {name}` writes a backend, which begins with"
        return f"torch has this device: {writes}\n\n{ten_lines(name)}"
    others = f"accelcore's own are {', '.join(sorted(own))}" if own else "the README lists accelcore's own"
    advice = (
        f"install its package ({others}; `accelcore new-backend` writes one for a device of torch), or choose another"
    )
    near = nearest(name, offered | own.keys())
    if near is None:
        near = with_keyword(name)
    if near is None:
        return advice
    needs = "" if near in offered else f" Then {how_to_install(own[near])}."
    return f"did you mean {near!r}?{needs} Else {advice}"


def _say_once(text: str, source: str, backend: Backend, passed_over: tuple[Probe, ...]) -> None:
    launch = read_launch()
    if launch is not None and launch.rank != 0:
        return
    is_auto = parse(text, source) is None
    request = "auto" if is_auto else f"{source}={shown(text)}"
    imitated = {entry.name for entry in declared(plugins.EMULATORS)} if is_auto and passed_over else set()
    expected = [probe for probe in passed_over if probe.absent and probe.name in imitated]
    for level, probes in (
        (logging.WARNING, [probe for probe in passed_over if probe not in expected]),
        (logging.INFO, expected),
    ):
        if probes:
            reasons = "; ".join(f"{probe.name} does not work: {probe.reason}" for probe in probes)
            silence = f"; ACCEL_DEVICE={backend.name} chooses it without this message" if is_auto else ""
            _log_once(level, f"{request} chose {backend.name}:{backend.index}; {reasons}{silence}")
    for sentence in imitations():
        _log_once(logging.WARNING, sentence)
    unserved = unserved_device() if is_auto else None
    if unserved not in (None, backend.device.type):
        advice = f"`accelcore new-backend {unserved}` writes one"
        _log_once(logging.WARNING, f"torch has the device {unserved}, and no installed backend serves it: {advice}")


@cache
def _log_once(level: int, message: str) -> None:
    logger.log(level, "%s", message)

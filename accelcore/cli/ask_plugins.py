"""Asking the plugins: all in one child process; where that does not live to answer, each in one of its own.

So a plugin that crashes, exits or blocks its process is found and named, and the others are heard all the same.
"""

from __future__ import annotations

import os
import sys

from accelcore.cli import child, plugin_answers
from accelcore.cli.child import Ended
from accelcore.cli.plugin_answers import Answers
from accelcore.cli.selection_preview import Fault, SelectionPreview, asked
from accelcore.entrypoints import Declared, declared
from accelcore.environment import probe_timeout
from accelcore.errors import PluginError
from accelcore.plugins import BACKENDS, EXTENSIONS, Candidate, Extension
from accelcore.probe import Probe

__all__ = ["ask_plugins"]

_START = 10.0  # seconds that a child has beside what plugins may take: it starts on a busy machine, too


def ask_plugins() -> tuple[Answers, str]:
    """What every plugin answers; and how all together ended their process, where none does so alone."""
    limit = probe_timeout()
    # A list is asked one after the other, and all once more for the error where none can be had; then extensions load.
    choosing = limit * (asked()[0].count(",") + 3)
    ended, found = _ask(2 * limit + choosing, "all")
    if found is not None:
        sys.stderr.write(ended.stderr)
        return found, ""
    together = _fate(ended, "loading and probing all plugins at once")
    candidates: list[Candidate] = []
    extensions: list[Extension] = []
    culprit: Ended | None = None
    backends = declared(BACKENDS)
    for name in dict.fromkeys(entry.name for entry in backends):
        ended, found = _ask(limit, "backend", name)
        sys.stderr.write(ended.stderr)
        if found is None:
            together, culprit = "", ended
            candidates.append(_ended_by([entry for entry in backends if entry.name == name], ended))
        else:
            candidates += found.candidates
    for position, entry in enumerate(declared(EXTENSIONS)):
        ended, found = _ask(limit, "extension", str(position))
        sys.stderr.write(ended.stderr)
        if found is None:
            together, culprit = "", ended
            reason = f"{_fate(ended, 'loading it')}; every select() loads it"
            extensions.append(Extension(entry.name, entry.label, reason))
        else:
            extensions += found.extensions
    if culprit is not None and asked()[0] == "auto":  # which loads every plugin
        return Answers(tuple(candidates), tuple(extensions), _no_choice(culprit)), together
    ended, found = _ask(choosing, "selection")
    selection = _no_choice(ended) if found is None else found.selection
    return Answers(tuple(candidates), tuple(extensions), selection), together


def _ask(limit: float, *question: str) -> tuple[Ended, Answers | None]:
    """The answers, None where the process did not live to give them."""
    ended = child.call(plugin_answers.__name__, *question, environ=os.environ, limit=_START + limit)
    try:
        return ended, Answers.from_json(ended.stdout) if ended.status == 0 else None
    except ValueError:  # a plugin made it exit as if all were well
        return ended, None


def _fate(ended: Ended, cause: str) -> str:
    if ended.status is None:
        return f"{cause} blocked the process, which was killed after {ended.limit:g} seconds"
    if ended.signal:
        return f"{cause} ended the process by {ended.signal}{ended.where}"
    return f"{cause} ended the process with exit code {ended.status}"


def _ended_by(owners: list[Declared], ended: Ended) -> Candidate:
    labels = " and ".join(entry.label for entry in owners)
    reason = _fate(ended, "loading or probing it")
    remedy = (
        f"repair or uninstall {labels}; until then name another backend in ACCEL_DEVICE or in select(), which then "
        "does not load this one"
    )
    probe = Probe(owners[0].name, available=False, reason=reason, remedy=remedy)
    return Candidate(probe.name, labels, probe, error=PluginError(reason))


def _no_choice(ended: Ended) -> SelectionPreview:
    request, source = asked()
    fault = Fault(
        type="",
        what="select() would take the script down",
        why=_fate(ended, "loading the plugins for it"),
        available="",
        remedy="repair or uninstall what is broken; a backend's plugin is not loaded where ACCEL_DEVICE or select() "
        "names another one",
    )
    return SelectionPreview(request, source, error=fault)

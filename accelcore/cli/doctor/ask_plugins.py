"""Ask plugins in child processes, because a plugin may crash, exit or block the process that loads it.

All are asked in one child. If it does not live to answer, each plugin is asked in a child of its own: the plugin to
blame is named, and the others are shown as usual. The answers cross over as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn, TypedDict

from accelcore.devices import Probe, plugins
from accelcore.devices.plugins import BACKENDS, EXTENSIONS, Candidate, Extension, declared
from accelcore.devices.request import parse, probe_timeout, requested_device
from accelcore.devices.select import decide
from accelcore.errors import AccelError, PluginError
from accelcore.known_faults import KnownFault
from accelcore.util import child_process
from accelcore.util.child_process import Ended

_START = 10.0  # seconds that a child has to start on a busy machine, beside the time for its plugins


class Selection(TypedDict):
    """Choice that `select()` would make in the present environment, found without creating a backend."""

    request: str  # the text of the request; `"auto"` if ACCEL_DEVICE is not set
    source: str  # `"ACCEL_DEVICE"` or `"default"`
    chosen: str | None  # the device, `"cpu:0"`; None if there would be an error
    why: str  # the reason for this choice
    # `name`, `reason` and `remedy` of each device that came before the chosen one and cannot be used
    passed_over: list[dict[str, str]]
    # `type`, `what`, `why`, `available` and `remedy` of the error that `select()` would raise; the `type` is empty if
    # the process would end or block instead
    error: dict[str, str] | None


@dataclass(frozen=True)
class Answers:
    """The answers to one question, or to all: without hooks, and of an error only the text."""

    candidates: tuple[Candidate, ...] = ()
    extensions: tuple[Extension, ...] = ()
    selection: Selection | None = None

    def to_json(self) -> str:
        told = [{**asdict(replace(it, hooks=None, error=None)), "error": bool(it.error)} for it in self.candidates]
        return json.dumps([told, [asdict(replace(it, hooks=None)) for it in self.extensions], self.selection])

    @classmethod
    def from_json(cls, text: str) -> Answers:
        told, extensions, selection = json.loads(text)
        for it in told:
            fields: dict[str, Any] = it["probe"]
            fields |= {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
            it["probe"], it["faults"] = Probe(**fields), tuple(KnownFault(**fault) for fault in it["faults"])
            it["error"] = PluginError(it["probe"].reason) if it["error"] else None
        return cls(tuple(Candidate(**it) for it in told), tuple(Extension(**it) for it in extensions), selection)


def ask_plugins() -> Answers:
    """Return every plugin's answer."""
    limit = probe_timeout()
    # Plugins in a list are asked one after the other, and once more for the error; then extensions load.
    choosing = limit * (_asked()[0].count(",") + 3)
    ended, found = _ask(2 * limit + choosing, "all")
    if found is not None:
        return found
    candidates: list[Candidate] = []
    extensions: list[Extension] = []
    culprit: Ended | None = None
    backends = declared(BACKENDS)
    for name in dict.fromkeys(entry.name for entry in backends):
        ended, found = _ask(limit, "backend", name)
        if found is None:
            culprit = ended
            labels = " and ".join(entry.label for entry in backends if entry.name == name)
            reason = f"while it was loaded or probed, the process {ended.fate}"
            remedy = f"repair or uninstall {labels}; until then name another backend in ACCEL_DEVICE or in select()"
            probe = Probe(name, available=False, reason=reason, remedy=remedy)
            candidates.append(Candidate(name, labels, probe, error=PluginError(reason)))
        else:
            candidates += found.candidates
    for position, entry in enumerate(declared(EXTENSIONS)):
        ended, found = _ask(limit, "extension", str(position))
        if found is None:
            culprit = ended
            reason = f"while it was loaded, the process {ended.fate}; every select() loads it"
            extensions.append(Extension(entry.name, entry.label, reason))
        else:
            extensions += found.extensions
    if culprit is not None and _asked()[0] == "auto":  # which loads every plugin
        selection = _no_choice(culprit)
    else:
        ended, found = _ask(choosing, "selection")
        selection = (found and found.selection) or _no_choice(ended)
    return Answers(tuple(candidates), tuple(extensions), selection)


def main() -> NoReturn:
    """Answer the question in the arguments, in the child process."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # what a plugin prints is not an answer
        sys.stdout = sys.stderr
        try:
            answer = _answer(*sys.argv[1:]).to_json()
        except Exception as error:  # noqa: BLE001  # a plugin's own error is among the answers
            answer = json.dumps(plugins.describe_error(error))
        answers.write(answer)
    sys.stderr.flush()
    os._exit(0)  # without what a plugin would do at exit, and without waiting for its threads


def _answer(question: str, which: str = "") -> Answers:
    """Answer `all`, `backend NAME`, `extension POSITION` or `selection`."""
    if question == "backend":
        candidate = plugins.find(which)
        return Answers(() if candidate is None else (candidate,))
    if question == "extension":
        return Answers(extensions=tuple(plugins.load_extensions([declared(EXTENSIONS)[int(which)]])))
    if question == "all":
        return Answers(tuple(plugins.probe_all().values()), tuple(plugins.load_extensions()), _preview_selection())
    selection = _preview_selection()
    if selection["chosen"] is not None:
        plugins.load_extensions()  # as `select()` does for the device it has chosen
    return Answers(selection=selection)


def _asked() -> tuple[str, str]:
    """Return the request in the present environment, and where it comes from."""
    text = requested_device()
    return ("auto", "default") if text is None else (text, "ACCEL_DEVICE")


def _preview_selection() -> Selection:
    """Follow `select()` up to where it would create a backend."""
    request, source = _asked()
    preview = Selection(request=request, source=source, chosen=None, why="", passed_over=[], error=None)
    try:
        preview["chosen"], passed_over = decide(request, "ACCEL_DEVICE", str)
    except AccelError as error:
        words = {name: getattr(error, name) for name in ("what", "why", "available", "remedy")}
        return {**preview, "error": {"type": type(error).__name__, **words}}
    preview["passed_over"] = [{"name": it.name, "reason": it.reason, "remedy": it.remedy} for it in passed_over]
    choices = parse(request, "ACCEL_DEVICE")
    if choices is None:
        preview["why"] = "the highest priority of the backends that work here"
    else:
        several = len(choices) > 1
        preview["why"] = "the first of ACCEL_DEVICE that works here" if several else "ACCEL_DEVICE asks for it"
    return preview


def _ask(limit: float, *question: str) -> tuple[Ended, Answers | None]:
    """Ask in a child process; return None for the answers if it did not live to give them."""
    ended = child_process.call(__name__, *question, environ=os.environ, limit=_START + limit)
    answered = ended.status == 0 and ended.stdout != ""  # a plugin may end the process with exit code 0
    if answered or question[0] in ("backend", "extension"):
        sys.stderr.write(ended.stderr)
    if not answered:
        return ended, None
    if isinstance(reason := json.loads(ended.stdout), str):
        raise PluginError(
            "the installed plugins cannot be found or asked",
            why=reason,
            remedy="repair the damaged installation; pip check may tell which distribution it is",
        )
    return ended, Answers.from_json(ended.stdout)


def _no_choice(ended: Ended) -> Selection:
    request, source = _asked()
    error = {
        "type": "",
        "what": "select() would take the script down",
        "why": f"while the plugins for it were loaded, the process {ended.fate}",
        "available": "",
        "remedy": "repair or uninstall what is broken; if ACCEL_DEVICE or select() names another backend, a broken "
        "plugin is not loaded",
    }
    return Selection(request=request, source=source, chosen=None, why="", passed_over=[], error=error)

"""What plugins answer to doctor, and the child process in which they are asked.

A plugin may take down the process that loads it, so doctor's own loads none. The answers cross over as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import NoReturn

from accelcore import plugins
from accelcore.cli.selection_preview import Fault, PassedOver, SelectionPreview, preview_selection
from accelcore.entrypoints import declared
from accelcore.errors import PluginError
from accelcore.known_faults import KnownFault
from accelcore.plugins import EXTENSIONS, Candidate, Extension
from accelcore.probe import Probe

__all__ = ["Answers", "main"]


@dataclass(frozen=True)
class Answers:
    """What came of one question, or of all.

    Attributes:
        candidates: the backends; without their hooks, and with no more of an error than its words.
        extensions: the extensions, without their hooks.
        selection: what `select()` would do; None where that was not the question.
    """

    candidates: tuple[Candidate, ...] = ()
    extensions: tuple[Extension, ...] = ()
    selection: SelectionPreview | None = None

    def to_json(self) -> str:
        return json.dumps(
            {
                "candidates": [
                    {
                        "name": candidate.name,
                        "distribution": candidate.distribution,
                        "broken": candidate.error is not None,
                        "probe": {field.name: getattr(candidate.probe, field.name) for field in fields(Probe)},
                        "faults": [asdict(fault) for fault in candidate.faults],
                    }
                    for candidate in self.candidates
                ],
                "extensions": [[one.name, one.distribution, one.reason] for one in self.extensions],
                "selection": self.selection and asdict(self.selection),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Answers:
        """Raises ValueError where the text is not whole, PluginError where no plugin could be asked."""
        data = json.loads(text)
        if "error" in data:
            raise PluginError(
                "the installed plugins cannot be found or asked",
                why=data["error"],
                remedy="repair the damaged installation; pip check may tell which distribution it is",
            )
        return cls(
            tuple(_candidate(**candidate) for candidate in data["candidates"]),
            tuple(Extension(*extension) for extension in data["extensions"]),
            _preview(**data["selection"]) if data["selection"] else None,
        )


def _candidate(
    name: str, distribution: str, broken: bool, probe: dict[str, object], faults: list[dict[str, str]]
) -> Candidate:
    values = {field: tuple(value) if isinstance(value, list) else value for field, value in probe.items()}
    answer = Probe(**values)  # type: ignore[arg-type]  # which checks them itself
    known = tuple(KnownFault(**fault) for fault in faults)
    return Candidate(name, distribution, answer, error=PluginError(answer.reason) if broken else None, faults=known)


def _preview(passed_over: list[dict[str, str]], error: dict[str, str] | None, **rest: str) -> SelectionPreview:
    over = tuple(PassedOver(**passed) for passed in passed_over)
    return SelectionPreview(**rest, passed_over=over, error=Fault(**error) if error else None)


def main() -> NoReturn:
    """Answer the question that the arguments are: `all`, `backend NAME`, `extension POSITION` or `selection`."""
    question, *which = sys.argv[1:]
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        # What a plugin prints is no answer.
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        try:
            answer = _QUESTIONS[question](*which).to_json()
        except Exception as error:  # noqa: BLE001  # no plugin's, for those are in the answers
            answer = json.dumps({"error": plugins.describe(error)})
        answers.write(answer)
    sys.stderr.flush()
    os._exit(0)  # without what a plugin would do at exit, and without waiting for its threads


def _all() -> Answers:
    return Answers(tuple(plugins.probe_all().values()), tuple(plugins.load_extensions()), preview_selection())


def _backend(name: str) -> Answers:
    candidate = plugins.find(name)
    return Answers(candidates=() if candidate is None else (candidate,))


def _extension(position: str) -> Answers:
    entry = declared(EXTENSIONS)[int(position)]
    error = plugins.within_time(entry.point.load)
    return Answers(extensions=(Extension(entry.name, entry.label, "" if error is None else plugins.describe(error)),))


def _selection() -> Answers:
    selection = preview_selection()
    if selection.chosen is not None:
        plugins.load_extensions()  # as `select()` does for what it has chosen
    return Answers(selection=selection)


_QUESTIONS: dict[str, Callable[..., Answers]] = {
    "all": _all,
    "backend": _backend,
    "extension": _extension,
    "selection": _selection,
}

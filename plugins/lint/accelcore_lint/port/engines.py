"""Libraries that train a script themselves, such as accelerate: what the report says of them."""

from __future__ import annotations

import re

from accelcore_lint.port.rule import Note

ENGINES = (
    "accelerate|lightning|pytorch_lightning|lightning_fabric|composer|deepspeed|ignite|fastai|mmengine|colossalai"
    "|horovod|byteps"
)
"""Packages that choose the device and wrap the optimizer."""

_TRAINERS = r"\w*Trainer"
_IMPORTED = re.compile(
    rf"(?m)^[ \t]*(?:import|from)[ \t]+(?:({ENGINES})\b"
    rf"|(transformers|trl)\b(?:\.\w+)*[ \t]+import[ \t]+(?:\([^()]*\b{_TRAINERS}\b|[^\n#(]*\b{_TRAINERS}\b)"
    rf"|(transformers|trl)[ \t]*(?:$|#|,|as\b)(?=[\s\S]*\b\3\.{_TRAINERS}\())"
)
_STARTED = re.compile(rf"\b(?:Accelerator|Fabric|{_TRAINERS}|Runner|Booster|\w*[lL]earner|\w*_trainer|initialize)\(")
_OF_LIGHTNING = re.compile(r"\b(?:\w*[tT]rainer|Lightning\w*Module|Fabric|Callback)\b")
_WRAPS = {
    "ignite": re.compile(r"\bauto_(?:model|optim|dataloader)\("),
    "accelerate": re.compile(r"(?<!torch\.)\b[Aa]ccelerator\b"),
    "lightning": _OF_LIGHTNING,
    "pytorch_lightning": _OF_LIGHTNING,
}
"""What wraps the model or the optimizer, of libraries that also have functions which do not."""

_LIGHTNING, _TRANSFORMERS = "moving.md#from-lightnings-trainer", "moving.md#from-hugging-faces-trainer"
_PAGES = {
    "accelerate": "moving/accelerate.md",
    "mmengine": "moving/mmengine.md",
    "lightning_fabric": "moving/fabric.md",
    "lightning": _LIGHTNING,
    "pytorch_lightning": _LIGHTNING,
    "transformers": _TRANSFORMERS,
    "trl": _TRANSFORMERS,
}
_TEXT = (
    "{} trains this script: it chooses the device and wraps the model and the optimizer. port leaves that as it is, so "
    "the script runs on the devices that {} supports. To train with accelcore, change it by hand: docs/{}{}"
)

_TEXT_OF_BRANCH = (
    "where {} trains this script, it chooses the device and wraps the model and the optimizer. port leaves these lines "
    "as they are, so they run on the devices that {} supports. To train with accelcore there, change them by hand: "
    "docs/{}{}"
)
"""The text if the script imports the library under a condition, or in a function."""


def wraps(name: str, source: str) -> bool:
    """Return whether a library wraps the model or the optimizer of a source; ignite's loops alone do not."""
    return name not in _WRAPS or _WRAPS[name].search(source) is not None


def engine_in(source: str) -> tuple[str, int] | None:
    """Return the library that a source imports and starts to train with, and the line of the import."""
    found = _IMPORTED.search(source)
    if found is None or _STARTED.search(source) is None:
        return None
    name = found[1] or found[2] or found[3]
    return (name, source.count("\n", 0, found.end(found.lastindex or 0)) + 1) if wraps(name, source) else None


def engine_note(name: str, line: int, source: str) -> Note:
    """Return what to know of the library by which a script trains, perhaps only where it imports it."""
    page = _PAGES.get(name)
    shows = "" if page is None else " shows a script" if "#" in page else " shows such a script before and after"
    is_always = not source.splitlines()[line - 1][:1].isspace()
    text = (_TEXT if is_always else _TEXT_OF_BRANCH).format(name, name, page or "moving.md", shows)
    return Note(line, "engine", text)

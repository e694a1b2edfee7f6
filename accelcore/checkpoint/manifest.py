"""The manifest of a checkpoint: what files there are, their sizes and digests, and which rows are in which of them."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

__all__ = [
    "FORMAT",
    "MANIFEST",
    "MODEL",
    "RANK",
    "UNREADABLE",
    "WITH_PIECES",
    "WITH_TRAINERS",
    "digest_of",
    "digest_of_manifest",
    "file_of",
    "read_manifest",
    "verify",
    "without_twins",
]

MANIFEST = "manifest.json"
FORMAT, WITH_PIECES, WITH_TRAINERS = 2, 3, 4
"""Of a checkpoint all of whose tensors are whole; of one where ranks have written pieces; of several trainers."""
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a file of somebody else's making can raise."""

MODEL = "model"
"""The file of a model."""

_READABLE = (1, FORMAT, WITH_PIECES, WITH_TRAINERS)
_LARGEST_MANIFEST = 1 << 26
RANK = "rank-"
"""What the names of files begin with that are a rank's own."""
_PART = re.compile(r"([A-Za-z][A-Za-z0-9_]*/)?[a-z]+(-\d{5,})?", re.ASCII)  # the folder is a trainer's


def file_of(trainer: str, part: str) -> str:
    """A file of one of several trainers, or, where its name is "", of the only one."""
    return f"{trainer}/{part}" if trainer else part


def verify(path: Path, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are as it says; see `store.Checkpoint`.

    Raises:
        one of `UNREADABLE`: they are not.
    """
    manifest = read_manifest(path)
    digest = manifest.pop("sha256")
    if digest != digest_of_manifest(manifest):
        raise ValueError(f"{MANIFEST} was changed after it was written")
    if type(manifest["format"]) is not int or manifest["format"] not in _READABLE:
        raise ValueError(f"its format is {manifest['format']}; this accelcore reads formats 1 to {WITH_TRAINERS}")
    for number in ("steps", "world_size"):
        if type(manifest[number]) is not int or manifest[number] < 0:
            raise ValueError(f"{MANIFEST} says {number}={manifest[number]!r}")
    for number_of, (name, facts) in enumerate(manifest["files"].items()):
        if not _PART.fullmatch(name):
            raise ValueError(f"{MANIFEST} names the file {name!r}")
        file = path / f"{name}.safetensors"
        if not file.is_file():
            raise ValueError(f"{name}.safetensors is missing, or no file")
        if file.stat().st_size != facts["bytes"]:
            raise ValueError(f"{name}.safetensors has {file.stat().st_size} of {facts['bytes']} bytes")
        is_piece = "-" in name and not file.name.startswith(RANK)
        if is_piece and number_of % share[1] != share[0]:
            continue  # another rank looks
        if digest_of(file) != facts["sha256"]:
            raise ValueError(f"{name}.safetensors was changed after it was written")
    if (manifest["format"] == WITH_TRAINERS) != ("trainers" in manifest):
        raise ValueError(f"its format is {manifest['format']}, which does not go with what it says of trainers")
    for name, steps in manifest.get("trainers", {}).items():
        if type(steps) is not int or steps < 0:
            raise ValueError(f"{MANIFEST} says that {name!r} has made {steps!r} steps")
    for places in (places for part in manifest.get("pieces", {}).values() for places in part.values()):
        for file, first, count in places:
            counts = type(first) is int and type(count) is int and min(first, count) >= 0
            if file not in manifest["files"] or not counts:
                raise ValueError(f"{MANIFEST} says that there are {count!r} rows from {first!r} on in {file!r}")
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """What the manifest of a checkpoint says, unverified."""
    file = path / MANIFEST
    if not file.is_file() or file.stat().st_size > _LARGEST_MANIFEST:  # a device would be read for ever
        raise ValueError(f"{MANIFEST} is missing, or no file of a manifest's size")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=without_twins)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} cannot be read as JSON: {error}") from error
    if not isinstance(manifest, dict):
        raise TypeError(f"{MANIFEST} holds no object")
    return manifest


def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; where two readers could take a key for two values, an error."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def digest_of_manifest(manifest: dict[str, Any]) -> str:
    """The SHA-256 of what a manifest says, itself left out."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def digest_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

"""Manifest of a checkpoint: its files with sizes and digests, and the rows that each rank's file holds."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from accelcore.errors import CheckpointError
from accelcore.util.text import is_whole

MANIFEST = "manifest.json"
FORMAT = 1
MODEL = "model"  # file of a model
RANK = "rank-"  # prefix of the files that belong to one rank
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors that reading a damaged or forged file can raise."""

_LARGEST_MANIFEST = 1 << 26
_FILE = re.compile(r"([A-Za-z][A-Za-z0-9_]*/)?[a-z]+(-\d{5,})?", re.ASCII)  # the folder is a trainer's


def file_of(trainer: str, name: str) -> str:
    """Return the path of a trainer's file in a checkpoint; a trainer that is saved alone has the name ""."""
    return f"{trainer}/{name}" if trainer else name


def verify(path: Path, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Return the manifest after checking all files against it; raise one of `UNREADABLE` if one does not match."""
    manifest = read_manifest(path)
    digest = manifest.pop("sha256")
    if digest != digest_of_manifest(manifest):
        raise ValueError(f"{MANIFEST} was changed after it was written")
    if manifest["format"] != FORMAT or type(manifest["format"]) is not int:
        raise CheckpointError(
            f"the checkpoint {path} has format {manifest['format']!r}, and this accelcore reads format {FORMAT}",
            remedy="read it with the version of accelcore that wrote it",
        )
    counts = {"steps": manifest["steps"], "world_size": manifest["world_size"]}
    counts |= {f"trainers[{name!r}]": steps for name, steps in manifest["trainers"].items()}
    for name, count in counts.items():
        if not is_whole(count):
            raise ValueError(f"{MANIFEST} has {name}={count!r}, which is not a count")
    if not isinstance(manifest["run"], str):
        raise TypeError(f"{MANIFEST} has run={manifest['run']!r}, which is not a string")
    for position, (name, facts) in enumerate(manifest["files"].items()):
        if not _FILE.fullmatch(name):
            raise ValueError(f"{MANIFEST} lists {name!r}, which is not the name of a file")
        file = path / f"{name}.safetensors"
        if not file.is_file():
            raise ValueError(f"{name}.safetensors is missing, or not a file")
        if file.stat().st_size != facts["bytes"]:
            raise ValueError(f"{name}.safetensors has {file.stat().st_size} of {facts['bytes']} bytes")
        is_piece = "-" in name and not file.name.startswith(RANK)
        if is_piece and position % share[1] != share[0]:
            continue  # another rank checks it
        if digest_of(file) != facts["sha256"]:
            raise ValueError(f"{name}.safetensors was changed after it was written")
    for places in (places for tensors in manifest["pieces"].values() for places in tensors.values()):
        for file, first, count in places:
            if file not in manifest["files"] or not is_whole(first) or not is_whole(count):
                raise ValueError(f"{MANIFEST} lists {count!r} rows from {first!r} on in {file!r}")
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, unverified."""
    file = path / MANIFEST
    if not file.exists():
        raise ValueError(f"{MANIFEST} is missing")
    if not file.is_file() or file.stat().st_size > _LARGEST_MANIFEST:  # reading a device would never end
        raise ValueError(f"{MANIFEST} is not a file, or larger than {_LARGEST_MANIFEST >> 20} MiB")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} cannot be read as JSON: {error}") from error
    if not isinstance(manifest, dict):
        raise TypeError(f"{MANIFEST} does not hold a JSON object")
    return manifest


def digest_of_manifest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its own digest."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
